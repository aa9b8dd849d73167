"""Loading evalsets: what a card promises is checked, and what is wrong is said with file and line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvalsetError
from pipeline.evalsets.cards import load_card, load_evalset
from pipeline.evalsets.cases import DocumentCase, check_distinct
from pipeline.evalsets.checks import check_each_once
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import CaseRecord, read_cases
from pipeline.records.record_files import write_cases
from tests.paths import ROOT

SHIPPED = ["workflows", "tool_calls", "prose", "choices", "calibration"]
DOCUMENTS = [
    {"id": f"d{i}", "cluster": f"c{i // 2}", "buckets": ["even"] if i % 2 == 0 else ["odd"], "text": f"text {i}"}
    for i in range(4)
]
TOOL_CALLS = [
    {
        "id": "t1",
        "cluster": "c",
        "messages": [{"role": "user", "content": "Order 2."}],
        "expected": {"name": "order", "arguments": {"n": 2}},
    }
]
CHOICES = [{"id": "q1", "cluster": "c", "question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}]
TRAJECTORIES = [
    {
        "id": "w1",
        "cluster": "c",
        "messages": [{"role": "user", "content": "Order 2."}],
        "state": {"orders": [], "sent": 0},
        "checks": [{"path": "sent", "equals": 2}],
    }
]
TOOLS = {"order": {"parameters": {"type": "object"}}}
CASES: dict[str, list[dict[str, Any]]] = {
    "documents": DOCUMENTS,
    "tool_calls": TOOL_CALLS,
    "choices": CHOICES,
    "trajectories": TRAJECTORIES,
}


def write(folder: Path, kind: str = "documents", cases: list[dict[str, Any]] | str | None = None, **card: Any) -> Path:
    """Write an evalset whose card fits its cases but for what `card` replaces; return the folder."""
    found = CASES[kind] if cases is None else cases
    text = found if isinstance(found, str) else "".join(json.dumps(c, ensure_ascii=False) + "\n" for c in found)
    parsed = [] if isinstance(found, str) else found
    buckets = [b for case in parsed for b in case.get("buckets", ())]
    folder.mkdir(exist_ok=True)
    (folder / "cases.jsonl").write_text(text, encoding="utf-8")
    settings = {
        "name": "mine",
        "version": "1",
        "licence": "CC0-1.0",
        "kind": kind,
        "description": "for tests",
        "made_by": "hand",
        "num_cases": max(1, len(parsed)),
        "sha256": digest_file(folder / "cases.jsonl"),
        "cluster": "a text",
        "num_clusters": len({c["cluster"] for c in parsed}),
        "buckets": {b: buckets.count(b) for b in set(buckets)},
    } | ({"tools": TOOLS} if kind == "trajectories" else {})
    data = {k: v for k, v in (settings | card).items() if v is not ...}
    (folder / "card.yaml").write_text(json.dumps(data), encoding="utf-8")  # JSON is YAML
    return folder


def refusal(folder: Path, load: Callable[[Path], Any] = load_evalset) -> str:
    """Return what loading says, less the folder."""
    with pytest.raises(EvalsetError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(folder))
    return message.removeprefix(f"{folder}/")


def test_a_case_is_what_it_asks_whatever_it_is_called() -> None:
    case = DocumentCase(id="a", cluster="c", buckets=("x",), text="one")
    assert case.digest == DocumentCase(id="b", cluster="d", text="one").digest
    assert case.digest != DocumentCase(id="a", cluster="c", buckets=("x",), text="two").digest


def test_the_same_case_under_another_id_is_refused_where_cases_are_counted(tmp_path: Path) -> None:
    twice = [*DOCUMENTS, DOCUMENTS[1] | {"id": "again", "cluster": "elsewhere", "buckets": []}]
    evalset = load_evalset(write(tmp_path, cases=twice))  # calibration texts may repeat
    with pytest.raises(EvalsetError, match=r":5: case 'again' asks and expects the same as the case on line 2; "):
        check_distinct(tmp_path / "cases.jsonl", evalset.cases)


@pytest.mark.parametrize(("num", "said"), [(3, ""), (8, r".*5 more \(lines 4, 5, 6, 7, 8\)"), (9, r".* 8, \.\.\.\)")])
def test_all_doubled_cases_are_named_at_once(num: int, said: str) -> None:
    """Each took another run to learn."""
    cases = [DocumentCase(id=str(i), cluster="c", text="one" if i else "two") for i in range(num)]
    with pytest.raises(EvalsetError, match=rf":3: case '2' .*: remove one{said}$"):
        check_each_once(Path("cases.jsonl"), cases)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\ufeff" + json.dumps(DOCUMENTS[0]) + "\n", "cases.jsonl:1: expected UTF-8 without a byte-order mark"),
        (json.dumps(DOCUMENTS[0]) + "\n\n", "cases.jsonl:2: expected a case, found an empty line"),
    ],
)
def test_what_editors_leave_behind_is_named(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(write(tmp_path, cases=text)).startswith(line)


@pytest.mark.parametrize("kind", CASES)
def test_a_set_of_each_kind_loads(tmp_path: Path, kind: str) -> None:
    evalset = load_evalset(write(tmp_path / "e", kind))
    assert [case.id for case in evalset.cases] == [case["id"] for case in CASES[kind]]
    assert evalset.card.kind == kind


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_sets_load(name: str) -> None:
    assert load_evalset(ROOT / "evalsets" / name).card.name == name


def test_digests_follow_the_content_and_not_the_layout(tmp_path: Path) -> None:
    first = load_evalset(write(tmp_path / "a"))
    moved = load_evalset(Path(shutil.copytree(tmp_path / "a", tmp_path / "b")))
    reordered = [dict(reversed(case.items())) for case in DOCUMENTS]
    respelled = load_evalset(write(tmp_path / "c", cases=reordered))
    edited = load_evalset(write(tmp_path / "d", cases=[*DOCUMENTS[:3], DOCUMENTS[3] | {"text": "other"}]))
    assert moved.digest == first.digest != edited.digest
    assert [c.digest for c in respelled.cases] == [c.digest for c in first.cases]
    changed = [x.digest != y.digest for x, y in zip(first.cases, edited.cases, strict=True)]
    assert changed == [False, False, False, True]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    evalset = load_evalset(write(tmp_path / "e", cases=[DOCUMENTS[0] | {"text": text}]))
    assert evalset.cases == (DocumentCase(id="d0", cluster="c0", buckets=("even",), text=text),)
    record = CaseRecord(case_id="d0", input_digest="x", cluster="c0", prompt=text, output=text, fingerprint="f")
    write_cases(tmp_path / "records.jsonl", [record, record])
    assert read_cases(tmp_path / "records.jsonl") == [record, record]


def without(key: str, case: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if k != key}


@pytest.mark.parametrize(
    ("kind", "case", "said"),
    [
        ("documents", without("text", DOCUMENTS[1]), "text: expected this key, found none"),
        ("documents", DOCUMENTS[1] | {"text": ""}, "text: expected 1 or more characters, got ''"),
        ("documents", DOCUMENTS[1] | {"id": ""}, "id: expected 1 or more characters, got ''"),
        ("documents", DOCUMENTS[1] | {"txt": "x"}, "txt: unknown key; remove it or correct its spelling"),
        ("documents", ["text"], "(whole): expected keys with values, got ['text']"),
        ("documents", DOCUMENTS[1] | {"id": "d" * 201}, "id: expected at most 200 characters, got 'ddd"),
        ("documents", DOCUMENTS[1] | {"id": "d\x1b[2J"}, "id: expected no control characters, got 'd\\x1b[2J'"),
        ("documents", DOCUMENTS[1] | {"buckets": ["b" * 101]}, "buckets.0: expected at most 100 characters, got 'bbb"),
        ("documents", DOCUMENTS[1] | {"buckets": ["b", "\u202eb"]}, "buckets.1: expected no control characters, got "),
        ("documents", DOCUMENTS[1] | {"buckets": [""]}, "buckets.0: expected 1 or more characters, got ''"),
        ("tool_calls", TOOL_CALLS[0] | {"expected": {"name": "order"}}, "expected.arguments: expected this key"),
        ("tool_calls", TOOL_CALLS[0] | {"messages": []}, "messages: expected 1 or more entries"),
        ("tool_calls", TOOL_CALLS[0] | {"messages": [{"role": "boss", "content": ""}]}, "messages.0.role: "),
        ("choices", CHOICES[0] | {"choices": ["2"]}, "choices: expected 2 or more entries"),
        (
            "choices",
            CHOICES[0] | {"choices": ["2", "4", "2"], "answer": 2},
            "answer: expected a choice that is there once, got '2'",
        ),
        ("choices", CHOICES[0] | {"answer": 2}, "answer: expected the index of one of the 2 choices, counted "),
        ("choices", CHOICES[0] | {"answer": -1}, "answer: expected 0 or more"),
        ("trajectories", TRAJECTORIES[0] | {"state": {"sent": float("nan")}}, "a value that JSON in UTF-8 can't hold"),
        ("trajectories", TRAJECTORIES[0] | {"state": {"sent": "\ud83d"}}, "a value that JSON in UTF-8 can't hold: "),
        ("trajectories", TRAJECTORIES[0] | {"checks": []}, "checks: expected 1 or more entries"),
        ("trajectories", TRAJECTORIES[0] | {"checks": [{"path": "sent"}]}, "checks.0.equals: expected this key"),
    ],
)
def test_a_malformed_case_is_named_by_its_line(tmp_path: Path, kind: str, case: Any, said: str) -> None:
    text = json.dumps(CASES[kind][0] | {"id": "first"}) + "\n" + json.dumps(case) + "\n"
    assert refusal(write(tmp_path / "e", kind, text)).startswith(f"cases.jsonl:2: {said}")


@pytest.mark.parametrize("line", ["{'id': 1}", '{"id": "d1"', "text"])
def test_a_line_that_is_no_json_is_named(tmp_path: Path, line: str) -> None:
    folder = write(tmp_path / "e", cases=json.dumps(DOCUMENTS[0]) + "\n" + line + "\n")
    assert refusal(folder).startswith("cases.jsonl:2: expected a line of JSON for each case, got another text (")


def test_a_line_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "e")
    path = folder / "cases.jsonl"
    path.write_bytes(path.read_bytes().replace(b"text 2", b"text \xff"))
    assert refusal(folder).startswith("cases.jsonl:3: not UTF-8 (")


def test_a_duplicated_id_is_named_with_both_lines(tmp_path: Path) -> None:
    folder = write(tmp_path / "e", cases=[*DOCUMENTS, DOCUMENTS[1] | {"text": "other"}])
    assert refusal(folder) == "cases.jsonl:5: case id 'd1' was already used on line 2"


def test_a_check_on_an_unknown_field_is_named(tmp_path: Path) -> None:
    wrong = TRAJECTORIES[0] | {"id": "w2", "checks": [{"path": "snet.n", "equals": 2}]}
    said = refusal(write(tmp_path / "e", "trajectories", [*TRAJECTORIES, wrong]))
    assert said == "cases.jsonl:2: a check names 'snet', which is no field of the state (orders, sent)"


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"num_cases": 5}, "the card says 5 cases, found 4"),
        ({"sha256": "0" * 64}, "the card says sha256 000000000000, found "),
        ({"buckets": {"even": 2, "odd": 1}}, "the card says 1 cases in bucket 'odd', found 2"),
        ({"buckets": {"even": 2}}, "the card says 0 cases in bucket 'odd', found 2"),
        ({"buckets": {"even": 2, "odd": 2, "prime": 1}}, "the card says 1 cases in bucket 'prime', found 0"),
        ({"num_clusters": 4}, "the card says 4 clusters, found 2"),
    ],
)
def test_cases_that_differ_from_their_card_are_refused(tmp_path: Path, card: dict[str, Any], said: str) -> None:
    assert refusal(write(tmp_path / "e", **card)).startswith(f"cases.jsonl: {said}")


def test_an_edited_case_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "e")
    path = folder / "cases.jsonl"
    path.write_text(path.read_text().replace("text 2", "text 9"))
    assert refusal(folder).endswith(
        f"the cases were edited; if the cases were meant to change, run `python -m evalsets.seal {folder}`"
    )


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"kind": "images"}, "kind: "),
        ({"licence": ...}, "expected licence, found none"),
        ({"num_cases": 0}, "num_cases: "),
        ({"colour": "red"}, "unknown colour, remove or correct the spelling"),
        ({"kind": "trajectories", "tools": ...}, "expected tools, found none"),
        ({"tools": {"order": {"description": "no parameters"}}}, "expected tools.order.parameters, found none"),
        ({"tools": {"order": {"parameters": {}, "effects": [{"do": "drop", "path": "x"}]}}}, "tools.order.effects.0"),
    ],
)
def test_a_malformed_card_is_refused(tmp_path: Path, card: dict[str, Any], said: str) -> None:
    assert refusal(write(tmp_path / "e", **{"cases": DOCUMENTS} | card), load_card).startswith(f"card.yaml: {said}")


def test_everything_that_is_wrong_with_a_card_is_said_at_once(tmp_path: Path) -> None:
    tools = {"order": {"parameters": {"type": "objekt"}}, "finish": {"parameters": {"required": "n"}}}
    folder = write(tmp_path / "e", licence=..., license="MIT", num_cases=..., sha256=..., version=1.0, tools=tools)
    said = refusal(folder, load_card)
    assert said.startswith("card.yaml: ") and set(said.removeprefix("card.yaml: ").split("; ")) == {
        "expected licence, num_cases, sha256, found none",
        "unknown license, remove or correct the spelling",
        "version: expected text, got 1.0",
        "tools.order.parameters: not a JSON Schema: type: 'objekt' is not valid under any of the given schemas, "
        "got {'type': 'objekt'}",
        "tools.finish.parameters: not a JSON Schema: required: 'n' is not of type 'array', got {'required': 'n'}",
        f"`python -m evalsets.seal {folder}` writes num_cases, sha256",
    }


@pytest.mark.parametrize("left", ["TODO", "todo", "", "  "])
def test_a_card_that_nobody_completed_is_refused(tmp_path: Path, left: str) -> None:
    """Data of unknown terms would be evaluated on, and a report would name them as evidence."""
    assert refusal(write(tmp_path / "e", licence=left)) == (
        f"card.yaml: licence: expected under which terms the cases may be used, got {left!r}; write them, for example "
        "CC-BY-4.0"
    )
    said = refusal(write(tmp_path / "e", licence=left, description=left))
    assert said.endswith(f"; description: expected what the cases are, got {left!r}; write it in a sentence")


def test_a_date_in_a_card_is_refused(tmp_path: Path) -> None:
    """YAML reads it as a date, and the digest of the card would crash on it."""
    folder = write(tmp_path / "e", "trajectories")
    card = (folder / "card.yaml").read_text().replace('{"type": "object"}', "{enum: [2026-01-01]}")
    (folder / "card.yaml").write_text(card)
    assert refusal(folder).startswith("card.yaml: a value that JSON can't hold, perhaps a date without quotes: ")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objekt"}, "type: "),
        ({"type": "object", "properties": {"n": {"type": "integer", "minimum": "1"}}}, "properties.n.minimum: "),
        ({"type": "object", "properties": {"n": "integer"}}, "properties.n: "),
        ({"type": "object", "required": "n"}, "required: "),
        ({"properties": {"n": {"pattern": "["}}}, "properties.n.pattern: "),
    ],
)
def test_a_broken_schema_is_refused_with_its_tool(tmp_path: Path, schema: dict[str, Any], said: str) -> None:
    tools = {"finish": {"parameters": {"type": "object"}}, "order": {"parameters": schema}}
    folder = write(tmp_path / "e", "trajectories", tools=tools)
    start = f"card.yaml: tools.order.parameters: not a JSON Schema: {said}"
    assert refusal(folder, load_card).startswith(start)
    assert refusal(folder).startswith(start)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "e")
    (folder / "cases.jsonl").unlink()
    missing = "cases.jsonl: expected the cases of evalset 'mine', found no file"
    assert refusal(folder) == missing
    for name, files in (("other", {"cases.jsonl": "0"}), ("e", "cases.jsonl"), ("e", {"images/1.png": "0"})):
        (tmp_path / "made.yaml").write_text(json.dumps({name: {"module": "grow", "files": files}}))
        assert refusal(folder) == missing
    for broken in ("", "[", "- e", "e:", "e: text", "e: [1]", "e: {files: }"):
        (tmp_path / "made.yaml").write_text(broken)
        assert refusal(folder) == missing
    (tmp_path / "made.yaml").write_text(json.dumps({"e": {"module": "grow", "files": {"cases.jsonl": "0"}}}))
    assert refusal(folder) == f"{missing}; make it by `python -m pipeline.running.made_files`"
    (folder / "cases.jsonl").write_text("")
    assert refusal(folder) == "cases.jsonl: expected at least one case, found none"
    for content, said in (
        (b"name: [", "card.yaml: not valid YAML: "),
        (b"name: \xff", "card.yaml: not valid YAML: "),
        (b"", "card.yaml: expected name, version, "),
        (b"[name]", "card.yaml: (whole): "),
        (b"name: 2026-02-31", "card.yaml: not valid YAML: a value that can't be read"),
    ):
        (folder / "card.yaml").write_bytes(content)
        assert refusal(folder).startswith(said)
    (folder / "card.yaml").unlink()
    assert refusal(folder).startswith("card.yaml: expected an evalset card, found no file; write one with name, ")
