"""Workflows against a model that answers from a list: where they end, and how they are judged."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import EngineError, RequestError
from pipeline.evalsets.cards import Card, Evalset
from pipeline.evalsets.cases import TrajectoryCase
from pipeline.products.text.evals.places import Places
from pipeline.products.text.evals.trajectories import evaluate, is_completed
from pipeline.products.text.serving.client import Reply
from pipeline.products.text.settings import TrajectoriesEval
from pipeline.records.evaluations import OUTGROWN, CaseRecord
from pipeline.running.journal import Journal

TOOLS = {
    "order": {
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        "effects": [
            {"do": "subtract", "path": "stock", "value": "{n}"},
            {"do": "append", "path": "orders", "value": "{n}"},
        ],
        "returns": {"left": "state:stock"},
    },
    "finish": {
        "parameters": {"type": "object"},
        "effects": [{"do": "set", "path": "finished", "value": True}],
        "is_final": True,
    },
}
CASE = TrajectoryCase.model_validate(
    {
        "id": "w1",
        "cluster": "depot",
        "buckets": ["steps/2-4"],
        "messages": [{"role": "user", "content": "Order 2."}],
        "state": {"stock": 5, "orders": [], "finished": False},
        "checks": [{"path": "orders", "equals": [2]}, {"path": "finished", "equals": True}],
    }
)
CARD = Card.model_validate(
    {
        "name": "w",
        "version": "1",
        "licence": "CC0-1.0",
        "kind": "trajectories",
        "description": "",
        "made_by": "",
        "num_cases": 1,
        "sha256": "",
        "cluster": "",
        "num_clusters": 1,
        "tools": TOOLS,
    }
)
ORDER, FINISH = '{"name":"order","arguments":{"n":2}}', '{"name":"finish","arguments":{}}'


class ListedClient:
    """Answers from a list, whatever is asked, and keeps what was asked."""

    def __init__(self, *answers: str | dict[str, Any] | Exception, cut: int | None = None) -> None:
        self.answers = list(answers)
        self.cut = cut  # place of the answer that max_tokens ends
        self.asked: list[dict[str, Any]] = []
        self.ended: list[str] = []

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> Reply:
        self.asked.append({"messages": list(messages), **options})
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        text, calls = (answer, ()) if isinstance(answer, str) else ("", (answer,))
        return Reply(
            text=text,
            tool_calls=calls,
            finish_reason="length" if len(self.asked) - 1 == self.cut else "stop",
            num_prompt_tokens=9,
            num_completion_tokens=3,
            latency_s=0.5,
            fingerprint="f",
        )

    async def tokenize(self, texts: list[str], **_: Any) -> list[list[int]]:
        return [[0] for _ in texts]

    def end_session(self, session: str) -> None:
        self.ended.append(session)

    def check_alive(self) -> None:
        """The endpoint of this test never dies."""


def run(folder: Path, client: ListedClient, context_length: int = 1024, **settings: Any) -> CaseRecord:
    """Run CASE with a client and return its record."""
    options = TrajectoriesEval(kind="trajectories", evalset="w", **{"max_turns": 4} | settings)
    with Journal(folder / "w.jsonl", fingerprint="f", key="s") as journal:
        context: Any = SimpleNamespace(
            name="w",
            settings=options,
            evalset=Evalset(card=CARD, cases=(CASE,), digest="d"),
            client=client,
            journal=journal,
            places=Places(1),
            take_place=contextlib.nullcontext,
            max_tokens=64,
            context_length=context_length,
            fingerprint="f",
            watch=None,
            list_own=lambda: [CASE],
        )
        (record,) = asyncio.run(evaluate(context))
    return record


def test_the_right_calls_complete(tmp_path: Path) -> None:
    client = ListedClient(ORDER, FINISH)
    record = run(tmp_path, client)
    assert record.scores == {"completed": 1.0} and record.failure is None
    assert record.output == f"{ORDER}\n{FINISH}"
    assert (record.latency_s, record.num_completion_tokens) == (1.0, 6)
    assert (record.case_id, record.input_digest, record.buckets) == ("w1", CASE.digest, ("steps/2-4",))
    assert client.asked[1]["messages"] == [
        {"role": "user", "content": "Order 2."},
        {"role": "assistant", "content": ORDER},
        {"role": "tool", "content": '{"left":3}'},
    ]
    assert {a["session"] for a in client.asked} == {"w1"} and client.ended == ["w1"]
    assert client.asked[0]["max_tokens"] == 64 and client.asked[0]["tools"] is None


@pytest.mark.parametrize(("cut", "cut_by"), [(None, ""), (0, "serving.max_tokens"), (1, "serving.max_tokens")])
def test_a_workflow_of_which_max_tokens_ended_a_turn_says_so(tmp_path: Path, cut: int | None, cut_by: str) -> None:
    """Its score of 0 looks like a model that can't do it."""
    assert run(tmp_path, ListedClient(ORDER, FINISH, cut=cut)).cut_by == cut_by


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param((ORDER.replace("2", "3"), FINISH), id="wrong argument"),
        pytest.param((ORDER, ORDER, FINISH), id="one call too many"),
        pytest.param((FINISH,), id="finished too early"),
        pytest.param((ORDER, "All done."), id="never finished"),
    ],
)
def test_a_wrong_final_state_is_a_wrong_answer(tmp_path: Path, answers: tuple[str, ...]) -> None:
    record = run(tmp_path, ListedClient(*answers))
    assert record.scores == {"completed": 0.0} and record.failure is None


def test_text_that_is_no_call_ends(tmp_path: Path) -> None:
    client = ListedClient("I can't do that.\nSorry.", ORDER, FINISH)
    record = run(tmp_path, client)
    assert len(client.asked) == 1
    assert record.output == "I can't do that.\\nSorry." and record.scores == {"completed": 0.0}


def test_the_final_tool_ends(tmp_path: Path) -> None:
    client = ListedClient(ORDER, FINISH, ORDER)
    assert run(tmp_path, client).scores == {"completed": 1.0}
    assert client.answers == [ORDER]


def test_the_turn_limit_ends(tmp_path: Path) -> None:
    client = ListedClient(ORDER, FINISH)
    assert run(tmp_path, client, max_turns=1).scores == {"completed": 0.0}
    assert len(client.asked) == 1 and client.ended == ["w1"]


def test_a_refused_call_goes_back_to_the_model_and_can_be_mended(tmp_path: Path) -> None:
    wrong = ['{"name":"order","arguments":{"n":9}}', '{"name":"buy","arguments":{}}']
    client = ListedClient(*wrong, ORDER, FINISH)
    assert run(tmp_path, client).scores == {"completed": 1.0}
    results = [m["content"] for m in client.asked[-1]["messages"] if m["role"] == "tool"]
    assert results == ['{"error":"not enough"}', '{"error":"unknown tool"}', '{"left":3}']


def test_a_server_that_parses_calls_gets_them_back_in_its_own_form(tmp_path: Path) -> None:
    order = {"id": "call-7", "type": "function", "function": {"name": "order", "arguments": '{"n": 2}'}}
    client = ListedClient(order, FINISH)
    assert run(tmp_path, client, send_tools=True).scores == {"completed": 1.0}
    assert client.asked[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [order]},
        {"role": "tool", "tool_call_id": "call-7", "content": '{"left":3}'},
    ]
    assert [t["function"]["name"] for t in client.asked[0]["tools"]] == ["order", "finish"]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (EngineError("no answer"), "infrastructure: no answer"),
        (RequestError("HTTP 400"), "infrastructure: HTTP 400"),
        (ValueError("surprise"), "evaluator: ValueError: surprise"),
    ],
)
def test_a_lost_request_is_no_answer_and_its_session_ends(tmp_path: Path, error: Exception, failure: str) -> None:
    client = ListedClient(ORDER, error)
    record = run(tmp_path, client)
    assert record.failure == failure and record.scores == {}
    assert client.ended == ["w1"], "a session that is never ended keeps weighing on its server"


def test_a_conversation_that_outgrows_the_context_is_a_wrong_answer(tmp_path: Path) -> None:
    """A candidate that rambles on would otherwise end as an error without a verdict."""
    client = ListedClient(ORDER, RequestError("HTTP 400: too many tokens"))
    record = run(tmp_path, client, context_length=140)
    assert record.failure is None and record.scores == {"completed": 0.0}
    assert record.output.splitlines()[-1] == OUTGROWN and client.ended == ["w1"]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_key_that_expired_or_a_model_that_is_gone_is_no_wrong_answer(tmp_path: Path, status: int) -> None:
    client = ListedClient(ORDER, RequestError(f"HTTP {status}", status=status))
    record = run(tmp_path, client, context_length=140)
    assert record.failure == f"infrastructure: HTTP {status}" and record.scores == {}


def test_the_state_of_a_case_is_never_shared(tmp_path: Path) -> None:
    run(tmp_path, ListedClient(ORDER, FINISH))
    assert CASE.state == {"stock": 5, "orders": [], "finished": False}


def test_a_check_on_a_missing_field_fails() -> None:
    assert is_completed(CASE, {"orders": [2], "finished": True})
    assert not is_completed(CASE, {"orders": [2]})
    assert not is_completed(CASE, {"orders": [2], "finished": 1}), "1 is not true"
