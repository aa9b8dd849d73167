"""Tasks that are answered in words: how they are asked, what of an answer counts, and what a verdict says of cuts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import RequestError, SettingsError
from pipeline.products.text.chat_templates import has_chat_template
from pipeline.products.text.evals.canary_prompts import pick_prompts
from pipeline.products.text.evals.generation import (
    Question,
    answer_question,
    check_questions_fit,
    read_question,
)
from pipeline.products.text.findings.speculation import check_speculation
from pipeline.products.text.serving.answers import Reply, find_ignored
from pipeline.products.text.serving.client import Client
from pipeline.products.text.settings import HarnessEval
from pipeline.records.digests import canonical_json
from pipeline.records.evaluations import CaseRecord
from pipeline.records.reasons import ReasonKind
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig
from tests.fakes.judging import compare_release
from tests.fakes.synthetic_records import Behaviour, make_params, rewrite_records, write_tree
from tests.products.text.test_client import FakeServer
from tests.products.text.test_client import answer as say

QUESTION = Question("q1", "one two", ("\n\n", "Q:"))
RECORD = CaseRecord(case_id="c", input_digest="d", cluster="c", prompt="p", output="o", fingerprint="f")


class Endpoint:
    """Answers everything alike and notes it; it counts a word as a token, and ten more in a chat."""

    def __init__(self, text: str = "said", finish_reason: str = "stop", *, counts: bool = True) -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.reply = Reply(text, (), finish_reason, 2, 9, 0.1, "f1")
        self._counts = counts

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> Reply:
        self.asked.append((messages, options))
        return self.reply

    async def complete(self, prompt: str, **options: Any) -> Reply:
        self.asked.append((prompt, options))
        return self.reply

    async def tokenize(self, texts: list[str]) -> list[list[int]]:
        if not self._counts:
            raise RequestError("HTTP 404")
        return [[1] * len(text.split()) for text in texts]

    async def tokenize_chat(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        return [1] * (10 + len(messages[0]["content"].split()))


def make_context(client: Any, *, is_plain: bool, context_length: int = 32) -> Any:
    return SimpleNamespace(name="mine", client=client, is_plain=is_plain, max_tokens=20, context_length=context_length)


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "chat"])
def test_a_question_is_sent_as_it_stands_or_as_the_message_of_a_user(is_plain: bool) -> None:
    client = Endpoint("so it is\n\nQ: and")
    answer = asyncio.run(answer_question(make_context(client, is_plain=is_plain), QUESTION))
    ((content, options),) = client.asked
    assert content == ("one two" if is_plain else [{"role": "user", "content": "one two"}])
    assert options["max_tokens"] == 20 and options.get("stops", ()) == (QUESTION.stops if is_plain else ())
    assert (answer.text, answer.num_tokens) == ("so it is", 9)


@pytest.mark.parametrize(
    ("text", "finish_reason", "max_tokens", "cut_by"),
    [
        ("half a", "length", None, "serving.max_tokens"),
        ("half a", "length", 5, "the task's max_gen_toks"),
        ("half a", "length", 50, "serving.max_tokens"),
        ("all", "stop", None, ""),
        ("all\n\nand more", "length", None, ""),  # a chat is not stopped there, and needs no more tokens
    ],
    ids=["ours", "the-tasks", "the-smaller", "ended", "stop-string"],
)
def test_an_answer_that_a_limit_ended_says_which(
    text: str, finish_reason: str, max_tokens: int | None, cut_by: str
) -> None:
    question = Question("q", "x", ("\n\n",), max_tokens)
    answer = asyncio.run(answer_question(make_context(Endpoint(text, finish_reason), is_plain=False), question))
    assert answer.cut_by == cut_by


@pytest.mark.parametrize(("is_plain", "num_words"), [(True, 13), (False, 3)], ids=["plain", "chat"])
def test_prompts_that_are_one_token_too_long_are_counted_and_the_first_is_named(is_plain: bool, num_words: int) -> None:
    fits = Question("fits", " ".join(["x"] * (num_words - 1)))
    long = [Question(name, " ".join(["x"] * num_words)) for name in ("first", "second")]
    short = Question("short-answer", long[0].text, max_tokens=19)
    client = Endpoint()
    context = make_context(client, is_plain=is_plain)
    asyncio.run(check_questions_fit(context, [fits, short]))
    with pytest.raises(SettingsError) as caught:
        asyncio.run(check_questions_fit(context, [fits, *long, short]))
    assert str(caught.value) == (
        "evals.mine: 2 of 4 prompts are too long, first that of case 'first': 13 tokens, which with serving.max_tokens "
        "20 are above serving.context_length 32; raise the length, lower serving.max_tokens, or shorten the cases"
    )
    assert not client.asked


def test_a_server_that_counts_no_tokens_is_asked_all_the_same() -> None:
    context = make_context(Endpoint(counts=False), is_plain=True, context_length=1)
    asyncio.run(check_questions_fit(context, [QUESTION]))


def test_a_server_that_counts_no_tokens_is_not_asked_to_for_each_prompt() -> None:
    """Fifty thousand refusals would stand in line before the first case."""
    questions = [Question(f"q{i}", f"word {i}") for i in range(50)]

    async def check(server: FakeServer) -> None:
        async with server, Client([server.url], "m", concurrency=2, timeout_s=5) as client:
            await check_questions_fit(make_context(client, is_plain=False), questions)
            await client.list_models()

    server = FakeServer(*[say(404, {"detail": "Not Found"})] * 2, say(200, {"data": [], "tokens": [1]}))
    asyncio.run(check(server))
    assert server.paths[-1] == "/v1/models" and len(server.paths) <= 4


@pytest.mark.parametrize("until", ["Q:", ["Q:", ""], None], ids=str)
def test_a_question_is_read_of_a_request_and_sampling_is_refused(until: Any) -> None:
    request = SimpleNamespace(task_name="t", doc={}, doc_id=3, args=("text", {"until": until, "max_gen_toks": 4}))
    assert read_question("mine", request) == Question("t-3", "text", ("Q:",) if until else (), 4)
    request.args = ("text", {"temperature": 0.7})
    with pytest.raises(SettingsError, match="evals.mine: the task samples .*only greedy tasks"):
        read_question("mine", request)


@pytest.mark.parametrize("limit", ["9", 0, -1, 2.5])
def test_a_limit_that_is_no_number_of_tokens_is_refused(limit: Any) -> None:
    request = SimpleNamespace(task_name="t", doc={}, doc_id=3, args=("text", {"max_gen_toks": limit}))
    with pytest.raises(SettingsError, match=f"above 0 as the task's max_gen_toks, got {limit!r}"):
        read_question("mine", request)


def test_a_misspelt_option_of_a_task_is_refused() -> None:
    """`untill` was left out of account, and answers ran on."""
    plain = {"until": ["a"], "do_sample": False, "temperature": 0.0, "top_p": 1, "num_beams": 1, "max_new_tokens": 4}
    request = SimpleNamespace(task_name="t", doc={}, doc_id=3, args=("text", plain))
    assert read_question("e", request).stops == ("a",)
    request.args = ("text", {"untill": ["a"]})
    with pytest.raises(SettingsError, match="e: the task's generation_kwargs have an unknown key 'untill'; is `until`"):
        read_question("e", request)


def test_a_text_counts_as_one_prompt_where_answers_are_held_against_max_tokens() -> None:
    body, answer = {"model": "m", "prompt": "a long text", "max_tokens": 4}, {"usage": {"completion_tokens": 5}}
    assert "expected at most 4 completion tokens" in str(find_ignored(body, answer))


def test_the_canary_asks_tasks_that_are_answered_in_words_too() -> None:
    questions = {"words": [Question(f"q{i}", f"text {i}", ("Q:",), 7) for i in range(9)]}
    settings = HarnessEval(kind="harness", task="t")
    evals: Any = {name: (settings, None) for name in ("choices", "words")}
    (first, *rest) = pick_prompts(evals, 3, questions=questions, is_plain=True)
    assert (first.case_id, first.content, first.stops, first.max_tokens) == ("words/q0", "text 0", ("Q:",), 7)
    assert [prompt.case_id for prompt in rest] == ["words/q3", "words/q6"]
    (chat,) = pick_prompts(evals, 1, questions=questions)
    assert chat.content == [{"role": "user", "content": "text 0"}]
    assert not pick_prompts(evals, 3)


def test_the_reference_decides_whether_a_product_is_asked_in_chats(tmp_path: Path) -> None:
    product = make_params(["a"], ["a"])
    candidates = product.candidates | {"a": product.candidates["a"].model_copy(update={"checkpoint": "other"})}
    product = product.model_copy(update={"candidates": candidates})
    (tmp_path / "models/agent").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/chat_template.jinja").write_text("{{ messages }}")
    assert not has_chat_template(product, tmp_path)
    (tmp_path / "models/agent/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(product, tmp_path)
    (tmp_path / "models/agent/tokenizer_config.json").write_text("{}")
    (tmp_path / "models/agent/chat_template.jinja").write_text("{{ messages }}")
    assert has_chat_template(product, tmp_path)


CUT = "of 60 answers cut by serving.max_tokens"


def cut_some(num: int) -> Any:
    def edit(records: list[CaseRecord]) -> list[CaseRecord]:
        cut = [record.model_copy(update={"cut_by": "serving.max_tokens"}) for record in records[:num]]
        return cut + records[num:]

    return edit


@pytest.mark.parametrize(
    ("of_reference", "of_candidate", "said"),
    [
        (0, 0, None),
        (2, 3, f"choices: reference 2 {CUT}, candidate 3 {CUT}; they are judged as they are: raise serving.max_tokens"),
        (2, 0, f"choices: reference 2 {CUT}; they"),
        (0, 1, f"choices: candidate 1 {CUT}; they"),
    ],
)
def test_the_verdict_says_how_many_answers_were_cut_on_either_side(
    tmp_path: Path, of_reference: int, of_candidate: int, said: str | None
) -> None:
    build = tmp_path / "build"
    write_tree(build, {"a": Behaviour()}, num_cases=60)
    rewrite_records(build, "reference", "choices", cut_some(of_reference))
    rewrite_records(build, "a", "choices", cut_some(of_candidate))
    verdict = compare_release(make_params(["a"], ["a"]), build).judgement.verdicts[0]
    notes = [reason.text for reason in verdict.reasons if "cut by" in reason.text]
    assert len(notes) == (said is not None) and all(str(said) in note for note in notes), notes


@pytest.mark.parametrize(
    ("num_cut", "score", "is_gated", "is_unfit"),
    [
        (31, 0.0, True, True),
        (30, 0.0, True, False),
        (60, 1.0, True, False),  # a task that asks for a letter, and takes no more
        (60, 0.0, False, False),
    ],
)
def test_a_reference_that_is_mostly_cut_and_wrong_shows_no_loss(
    tmp_path: Path, num_cut: int, score: float, is_gated: bool, is_unfit: bool
) -> None:
    """A damaged candidate passed that fails where answers may end: both sides are wrong where both are cut."""
    build = tmp_path / "build"
    write_tree(build, {"a": Behaviour()}, num_cases=60)
    changes = {"scores": {"accuracy": score}}

    def cut(records: list[CaseRecord]) -> list[CaseRecord]:
        return [r.model_copy(update=changes if r.cut_by else {}) for r in cut_some(num_cut)(records)]

    for name in ("reference", "a"):
        rewrite_records(build, name, "choices", cut)
    params = make_params(["a"], ["a"])
    if not is_gated:
        tolerances = {name: one for name, one in params.gate.tolerances.items() if not name.startswith("choices/")}
        params = params.model_copy(update={"gate": params.gate.model_copy(update={"tolerances": tolerances})})
    verdict = compare_release(params, build).judgement.verdicts[0]
    said = {reason.kind: reason.text for reason in verdict.reasons if "cut by" in reason.text}
    assert ReasonKind.LIMIT in said  # what the gate prints of a candidate that passes
    assert (verdict.outcome == "refused") == (ReasonKind.REFUSED in said) == is_unfit
    if is_unfit:
        expected = "choices: 31 of 60 answers are cut by serving.max_tokens and wrong, where no loss can show; raise"
        assert expected in said[ReasonKind.REFUSED]


def test_a_record_without_a_cut_is_written_as_before() -> None:
    """Each byte of a record is sealed: a field that says nothing must not appear in it."""
    assert "cut_by" not in canonical_json(RECORD.model_dump()) and "answer" not in RECORD.model_dump()
    cut = RECORD.model_copy(update={"cut_by": "serving.max_tokens", "answer": "all of it"})
    assert CaseRecord.model_validate_json(canonical_json(cut.model_dump())) == cut


@pytest.mark.parametrize(("num_counted", "said"), [(3, None), (2, "1 of 3 answers of several tokens carry no count")])
def test_answers_to_a_task_must_carry_the_counts_of_their_drafts(num_counted: int, said: str | None) -> None:
    counts = SpeculationCounts(
        method="prompt_lookup",
        num_tokens=3,
        num_target_forwards=3,
        num_completion_tokens=5,
        num_drafted=6,
        accepted_by_position=(2, 0, 0),
    )
    answer = RECORD.model_copy(update={"num_completion_tokens": 5, "output": "a\nb\nc\nd\ne\nf"})
    records = [answer.model_copy(update={"speculation": counts if i < num_counted else None}) for i in range(3)]
    total = counts.model_copy(
        update={
            name: getattr(counts, name) * num_counted
            for name in ("num_target_forwards", "num_completion_tokens", "num_drafted")
        }
        | {"accepted_by_position": (2 * num_counted, 0, 0)}
    )
    serving = SimpleNamespace(
        speculative=SpeculativeConfig(method="prompt_lookup", num_tokens=3), engine="transformers", version=None
    )
    evidence: Any = SimpleNamespace(
        candidate=SimpleNamespace(name="a", serving=serving),
        evaluation=SimpleNamespace(speculation=total, evals={"mine": SimpleNamespace(kind="harness")}),
        records={"mine": records},
        problems=(),
    )
    problems = check_speculation(evidence)
    assert len(problems) == (said is not None) and all(str(said) in problem for problem in problems)


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_a_tasks_limit_counts_by_each_of_its_names(name: str) -> None:
    """All but the first were passed over: answers went on to serving.max_tokens, and could be others."""
    request = SimpleNamespace(task_name="t", doc={}, doc_id=3, args=("text", {name: 4}))
    assert read_question("e", request).max_tokens == 4
    both = SimpleNamespace(task_name="t", doc={}, doc_id=3, args=("text", {name: 4, "max_completion_tokens": 9}))
    assert read_question("e", both).max_tokens == (9 if name == "max_completion_tokens" else 4)


@pytest.mark.parametrize(
    ("options", "is_greedy"),
    [
        ({"do_sample": False, "temperature": 1}, True),  # as all tasks of longbench have it
        ({"temperature": 0.0}, True),
        ({"num_beams": 1}, True),
        ({"temperature": 0.7}, False),
        ({"do_sample": True}, False),
        ({"do_sample": False, "num_beams": 10}, False),
    ],
    ids=["temperature-unused", "zero", "one-beam", "temperature", "samples", "beams"],
)
def test_a_task_is_greedy_as_lm_eval_has_it(options: dict[str, Any], is_greedy: bool) -> None:
    request = SimpleNamespace(task_name="t", doc={}, doc_id=3, args=("text", options))
    with contextlib.nullcontext() if is_greedy else pytest.raises(SettingsError, match="only greedy tasks can be"):
        read_question("e", request)
