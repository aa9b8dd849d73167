"""Simulated tools: what each effect does, and that a refused call changes nothing."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from pipeline.errors import ToolError
from pipeline.evalsets.cards import Tool
from pipeline.products.text.evals.tools import call_tool, read_path, render_result

STATE: dict[str, Any] = {
    "stock": {"lamp": {"north": 5, "note": "old"}},
    "orders": [],
    "sent": 0,
    "owner": "Ada",
    "flags": {"open": True},
}


def tool(*effects: dict[str, Any], required: tuple[str, ...] = (), **settings: Any) -> Tool:
    """Return a tool with text, count and optional arguments, of which some are required."""
    properties = {"item": {"type": "string"}, "n": {"type": "integer", "minimum": 1}, "note": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return Tool.model_validate({"parameters": parameters, "effects": effects, **settings})


def call(declared: Tool, **arguments: Any) -> tuple[dict[str, Any], Any]:
    """Call a tool on STATE and check that STATE itself stays as it is."""
    before = copy.deepcopy(STATE)
    after, result = call_tool({"t": declared}, STATE, "t", arguments)
    assert before == STATE
    return after, result


def effect(do: str, path: str, value: Any = None) -> dict[str, Any]:
    return {"do": do, "path": path, "value": value}


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        (effect("set", "owner", "{item}"), "owner", "lamp"),
        (effect("set", "fresh", {"who": "{item}", "n": "{n}"}), "fresh", {"who": "lamp", "n": 2}),
        (effect("set", "stock.{item}.south", "{n}"), "stock.lamp.south", 2),
        (
            effect("append", "orders", {"item": "{item}", "n": "{n}", "by": "post"}),
            "orders",
            [{"item": "lamp", "n": 2, "by": "post"}],
        ),
        (effect("append", "orders", ["{item}", "{n}", "x"]), "orders", [["lamp", 2, "x"]]),
        (effect("append", "new_log", "{n}"), "new_log", [2]),
        (effect("add", "sent", "{n}"), "sent", 2),
        (effect("add", "sent", -3), "sent", -3),
        (effect("subtract", "stock.{item}.north", "{n}"), "stock.lamp.north", 3),
        (effect("subtract", "stock.lamp.north", 5), "stock.lamp.north", 0),
    ],
)
def test_an_effect_changes_its_path_and_nothing_else(given: dict[str, Any], path: str, expected: Any) -> None:
    after, result = call(tool(given, returns="done"), item="lamp", n=2)
    assert result == "done"
    assert read_path(after, path) == expected
    *parents, key = path.split(".")
    expected_state = copy.deepcopy(STATE)
    (read_path(expected_state, ".".join(parents)) if parents else expected_state)[key] = expected
    assert after == expected_state


def test_an_optional_argument_that_was_left_out_leaves_its_key_out() -> None:
    given = effect("append", "orders", {"item": "{item}", "note": "{note}"})
    assert call(tool(given), item="lamp")[0]["orders"] == [{"item": "lamp"}]
    assert call(tool(given), item="lamp", note="x")[0]["orders"] == [{"item": "lamp", "note": "x"}]


@pytest.mark.parametrize(
    ("effects", "arguments", "reason"),
    [
        ([effect("subtract", "stock.{item}.north", "{n}")], {"item": "lamp", "n": 6}, "not enough"),
        ([effect("subtract", "stock.{item}.north", "{n}")], {"item": "sofa", "n": 1}, "unknown sofa"),
        ([effect("subtract", "stock.{item}.south", "{n}")], {"item": "lamp", "n": 1}, "unknown south"),
        ([effect("add", "missing", "{n}")], {"n": 1}, "unknown missing"),
        ([effect("set", "owner.name", "{item}")], {"item": "x"}, "unknown name"),
        ([effect("add", "owner", "{n}")], {"n": 1}, "owner takes a number"),
        ([effect("add", "sent", "{item}")], {"item": "1"}, "sent takes a number"),
        ([effect("add", "flags.open", "{n}")], {"n": 1}, "open takes a number"),
        ([effect("append", "owner", "{item}")], {"item": "x"}, "owner is not a list"),
        ([effect("set", "owner", "{note}")], {}, "missing argument note"),
        # what comes first is undone too
        (
            [effect("append", "orders", "{item}"), effect("subtract", "stock.lamp.north", 9)],
            {"item": "lamp"},
            "not enough",
        ),
    ],
)
def test_a_refused_call_changes_nothing_and_says_why(effects: Any, arguments: dict[str, Any], reason: str) -> None:
    after, result = call(tool(*effects), **arguments)
    assert after is STATE
    assert result == {"error": reason}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "bad arguments"),
        ({"item": "lamp"}, "bad arguments"),
        ({"item": "lamp", "n": "2"}, "bad argument n"),
        ({"item": "lamp", "n": 0}, "bad argument n"),
        ({"item": "lamp", "n": True}, "bad argument n"),
        ({"item": "lamp", "n": float("nan")}, "bad argument n"),
        ({"item": 3, "n": 2}, "bad argument item"),
        ({"item": "lamp", "n": 2, "colour": "red"}, "bad arguments"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, Any], reason: str) -> None:
    after, result = call(tool(effect("add", "sent", "{n}"), required=("item", "n")), **arguments)
    assert after is STATE and result == {"error": reason}


def test_an_unknown_tool_is_refused() -> None:
    assert call_tool({"t": tool()}, STATE, "other", {}) == (STATE, {"error": "unknown tool"})


def test_results_read_the_state_after_the_call() -> None:
    declared = tool(
        effect("add", "sent", "{n}"),
        returns={"sent": "state:sent", "left": {"north": "state:stock.{item}.north"}, "ok": True, "text": "{item}"},
    )
    assert call(declared, item="lamp", n=2)[1] == {"sent": 2, "left": {"north": 5}, "ok": True, "text": "{item}"}
    assert call(tool(returns="state:stock.{item}"), item="lamp")[1] == {"north": 5, "note": "old"}


def test_a_result_that_is_not_there_refuses_the_whole_call() -> None:
    after, result = call(tool(effect("add", "sent", "{n}"), returns="state:stock.{item}"), item="sofa", n=2)
    assert after is STATE and result == {"error": "unknown sofa"}


def test_paths_go_through_dicts_and_lists() -> None:
    state = {"orders": [{"n": 1}, {"n": 2}]}
    assert read_path(state, "orders.1.n") == 2
    for path, missing in (("orders.2.n", "2"), ("orders.-1.n", "-1"), ("orders.n", "n"), ("orders.0.n.x", "x")):
        with pytest.raises(ToolError, match=f"^unknown {missing}$"):
            read_path(state, path)


def test_a_result_is_rendered_as_compact_json() -> None:
    assert render_result({"a": [1, "ü"], "b": None}) == '{"a":[1,"ü"],"b":null}'
    assert json.loads(render_result("x")) == "x"
