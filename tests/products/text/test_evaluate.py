"""An evaluation as a whole: what is asked again, what is taken over, and what becomes of a case that failed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from filelock import FileLock

import pipeline.products.text.evals.evaluate as evaluate_module
import pipeline.products.text.evals.harness as harness
import pipeline.products.text.evals.jobs as jobs_module
import pipeline.products.text.evals.replica as replica_module
import pipeline.running.shards as shards_module
from pipeline.errors import EngineError, EvalsetError, EvidenceError, JournalError, SettingsError
from pipeline.products.text.evals.evaluate import evaluate_candidate
from pipeline.products.text.evals.replica import open_replica
from pipeline.products.text.serving.client import Reply
from pipeline.products.text.settings import HarnessEval, TextProduct
from pipeline.records.evaluations import Candidate, CaseRecord, Evaluation, read_cases
from pipeline.records.serving import ServingConfig
from pipeline.running.shards import Shard
from tests.evalsets.test_evalsets import write
from tests.fakes.synthetic_records import make_candidate, make_params
from tests.paths import ROOT

CALL = '{"name": "order", "arguments": {"n": 2}}'


class FakeEndpoint:
    """Answers every chat alike, fails where told to, counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: set[str] = set()
        self.cut: set[str] = set()  # by max_tokens
        self.fingerprint = "f1"

    async def chat(self, messages: list[dict[str, Any]], return_token_ids: bool = False, **_: Any) -> Reply:
        question = messages[-1]["content"]
        if not return_token_ids:
            self.asked.append(question)
        if question in self.broken:
            raise EngineError("connection reset")
        return Reply(
            text=CALL,
            tool_calls=(),
            finish_reason="length" if question in self.cut else "stop",
            num_prompt_tokens=9,
            num_completion_tokens=3,
            latency_s=0.1,
            fingerprint=self.fingerprint,
        )

    async def score(self, batch: list[list[int]], **_: Any) -> list[Any]:
        return []

    async def tokenize(self, texts: list[str], **_: Any) -> list[list[int]]:
        return [[0] * len(text.split()) for text in texts]

    def check_alive(self) -> None:
        """This endpoint never dies."""

    @contextlib.asynccontextmanager
    async def start(self, *_: Any, **__: Any) -> AsyncIterator[tuple[FakeEngine, FakeEndpoint]]:
        yield FakeEngine(self), self


class FakeEngine:
    """What is asked of an engine, in front of a fake endpoint; its canary is not counted as asked."""

    base_urls, proof, config, is_declared = ("http://fake",), "", {"engine.yaml": "a: 1\n"}, False

    def __init__(self, endpoint: FakeEndpoint) -> None:
        self._endpoint = endpoint
        self.facts = {"checkpoint": {"digest": endpoint.fingerprint}}
        self.fingerprint = endpoint.fingerprint

    @contextlib.asynccontextmanager
    async def connect(self, *_: Any, **__: Any) -> AsyncIterator[FakeEndpoint]:
        yield self._endpoint


def write_questions(folder: Path, *questions: str) -> None:
    write(
        folder,
        "tool_calls",
        [
            {
                "id": f"t{i}",
                "cluster": f"t{i}",
                "messages": [{"role": "user", "content": text}],
                "expected": json.loads(CALL),
            }
            for i, text in enumerate(questions)
        ],
    )


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEndpoint:
    fake = FakeEndpoint()
    monkeypatch.setattr(evaluate_module, "start_engine", fake.start)
    write_questions(tmp_path / "first", "a", "b")
    write_questions(tmp_path / "second", "c")
    return fake


class Seen:
    """A watch that counts what it is shown."""

    def __init__(self) -> None:
        self.cases: list[str] = []

    def rank(self, cluster: str) -> int:
        return 0

    def add(self, record: CaseRecord) -> None:
        self.cases.append(record.case_id)


def make_product(**settings: Any) -> TextProduct:
    evals = {name: {"kind": "tool_calls", "evalset": name} | settings.get(name, {}) for name in ("first", "second")}
    return TextProduct.model_validate(make_params(["a"], ["a"]).model_dump() | {"evals": evals})


def run(
    root: Path,
    candidate: Candidate | None = None,
    watches: dict[str, Any] | None = None,
    is_traced: bool = False,
    **settings: Any,
) -> Evaluation:
    params = make_product(**settings)
    traced = {name: made.model_copy(update={"trace": is_traced}) for name, made in params.candidates.items()}
    params = params.model_copy(update={"candidates": traced})
    return asyncio.run(
        evaluate_candidate(
            candidate or make_candidate("a"), params, root=root, build=root / "build/agent", watches=watches
        )
    )


def test_calls_that_max_tokens_ended_are_counted_in_the_evals_line(
    tmp_path: Path, endpoint: FakeEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """A score of 0 for half a call looks like a model that can't call."""
    endpoint.cut = {"a"}
    run(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    first, second = sorted(line for line in lines if "tool_call_exact_match" in line)
    assert first.startswith("  first: n=2, tool_call_exact_match 1.0000, 1 of 2 answers cut by serving.max_tokens ")
    assert "(raise it)" in first and "cut by" not in second
    records = read_cases(tmp_path / "build/agent/evaluations/a/first.jsonl")
    assert [record.cut_by for record in records] == ["serving.max_tokens", ""]


def test_servers_start_while_evals_are_described(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, describe, start = threading.Event(), evaluate_module.describe_evals, endpoint.start

    def wait_for_start(*args: Any) -> Any:
        assert started.wait(30), "nothing was started before lm-eval was there"
        return describe(*args)

    def note_start(*args: Any, **options: Any) -> Any:
        started.set()
        return start(*args, **options)

    monkeypatch.setattr(evaluate_module, "describe_evals", wait_for_start)
    monkeypatch.setattr(evaluate_module, "start_engine", note_start)
    assert run(tmp_path).evals["first"].num_cases == 2


def test_cases_that_can_t_be_read_end_it_before_anything_starts(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_module, "start_engine", None)
    with (tmp_path / "second/cases.jsonl").open("a") as file:
        file.write("broken")
    with pytest.raises(EvalsetError, match=r"second/cases\.jsonl"):
        run(tmp_path)


def test_a_server_that_fails_meanwhile_is_the_error_and_the_next_run_works(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise EngineError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(evaluate_module, "start_engine", fail)
        patched.setattr(evaluate_module, "describe_evals", fail)
        with pytest.raises(EngineError, match="^no room$"):
            run(tmp_path)
    assert run(tmp_path).evals["first"].num_cases == 2


def test_what_running_a_task_imports_is_there_before_it_runs() -> None:
    """In a process of its own: lm-eval defers these to the first evaluation, when servers would wait for them."""
    program = (
        "import sys; from pipeline.products.text.evals.harness import import_library\n"
        "from pipeline.products.text.settings import HarnessEval\n"
        "import_library('e', HarnessEval(kind='harness', task='t'))\n"
        "print(*(name for name in ('torch', 'lm_eval.evaluator') if name not in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_an_eval_that_nothing_changed_for_is_not_asked_again(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    before = run(tmp_path)
    assert sorted(endpoint.asked) == ["a", "b", "c"]
    endpoint.asked.clear()
    shutil.rmtree(tmp_path / "build/agent/evaluations")  # as DVC does before it runs a stage
    after = run(tmp_path, second={"send_tools": True})
    assert endpoint.asked == ["c"], "the edited eval alone"
    assert after.evals["first"] == before.evals["first"]
    assert after.evals["second"].key != before.evals["second"].key
    assert (tmp_path / "build/agent/evaluations/a/first.jsonl").is_file()


def test_a_watch_sees_what_is_taken_over_too(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """Else harm that is on disk by now would be looked for in the rest alone."""
    run(tmp_path)
    watches = {"first": Seen(), "second": Seen()}
    run(tmp_path, watches=watches, second={"send_tools": True})
    assert [len(watch.cases) for watch in watches.values()] == [2, 1]


def test_two_runs_do_not_write_into_one_journal(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    (tmp_path / "build/agent/journal").mkdir(parents=True)
    with (
        FileLock(tmp_path / "build/agent/journal/a.lock"),
        pytest.raises(JournalError, match="one process to work on 'a' at a"),
    ):
        run(tmp_path)
    assert not endpoint.asked
    run(tmp_path)


def test_an_edited_case_is_asked_again_with_the_rest_of_its_eval(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    run(tmp_path)
    endpoint.asked.clear()
    write_questions(tmp_path / "first", "a", "d")
    run(tmp_path)
    assert sorted(endpoint.asked) == ["a", "d"]


def change_code(root: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "digest_code", lambda stage, kind: "edited")


def change_endpoint(root: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.fingerprint = "f2"


def edit_records(root: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (root / "build/agent/journal/a/finished").glob("*.jsonl"):
        path.write_text(path.read_text().replace('"exact":1.0', '"exact":0.0'))


def damage_index(root: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "build/agent/journal/a/finished/evaluation.json").write_text("{")


def replace_by_a_file(root: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(root / "build/agent/journal/a/finished")
    (root / "build/agent/journal/a/finished").write_text("")


@pytest.mark.parametrize("change", [change_code, change_endpoint, edit_records, damage_index, replace_by_a_file])
def test_records_of_anything_else_are_never_taken_over(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    run(tmp_path)
    endpoint.asked.clear()
    change(tmp_path, endpoint, monkeypatch)
    run(tmp_path)
    assert sorted(endpoint.asked) == ["a", "b", "c"]
    assert (tmp_path / "build/agent/journal/a/finished/evaluation.json").is_file()


def test_the_records_that_a_later_run_may_take_over_cost_no_bytes(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """A suite of perplexities keeps 50 bytes a token and candidate: they were there twice."""
    run(tmp_path)
    folder, last = (tmp_path / "build/agent" / name for name in ("evaluations/a", "journal/a/finished"))
    names = [path.name for path in folder.iterdir() if path.is_file()]
    assert names and all((folder / name).samefile(last / name) for name in names)


def test_an_attached_endpoint_is_asked_again_as_it_may_serve_another_model_now(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    serving = ServingConfig(engine="openai", base_url="http://fake", model="m")
    candidate = make_candidate("a").model_copy(update={"serving": serving})
    run(tmp_path, candidate)
    run(tmp_path, candidate)
    assert sorted(endpoint.asked) == sorted("abc" * 2)


def test_a_kill_at_the_end_loses_no_answer(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journals went before the names that the next run takes the records by."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "copytree", mock.Mock(side_effect=KeyboardInterrupt))
        run(tmp_path)
    shutil.rmtree(tmp_path / "build/agent/evaluations/a")  # as DVC does before it runs the stage again
    endpoint.asked.clear()
    assert run(tmp_path).evals["first"].num_cases == 2
    assert endpoint.asked == []


def test_a_failed_case_fails_the_run_and_is_all_that_is_asked_again(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    endpoint.broken = {"b"}
    with pytest.raises(EvidenceError) as caught:
        run(tmp_path)
    message = str(caught.value)
    assert message.startswith("a: first: 1 of 2 cases have no judgement (1 infrastructure), first 't1': ")
    assert "connection reset" in message and "`dvc repro`" in message and "\n" not in message
    assert not (tmp_path / "build/agent/evaluations/a").exists(), "a half evaluation must not be recorded"
    endpoint.asked.clear()
    endpoint.broken = set()
    assert run(tmp_path).evals["first"].num_cases == 2
    assert endpoint.asked == ["b"]


def test_what_other_code_judged_is_not_mixed_in_after_a_kill(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.broken = {"b"}
    with pytest.raises(EvidenceError):
        run(tmp_path)
    endpoint.asked.clear()
    endpoint.broken = set()
    change_code(tmp_path, endpoint, monkeypatch)
    run(tmp_path)
    assert sorted(endpoint.asked) == ["a", "b", "c"]


def test_evals_work_side_by_side_on_as_many_places_as_the_endpoint_has(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last case of one eval waits for the other's, which could not begin if evals came one after another."""
    running, most, chat, other = 0, 0, endpoint.chat, asyncio.Event()

    async def meet(messages: list[dict[str, Any]], return_token_ids: bool = False, **options: Any) -> Reply:
        nonlocal running, most
        if return_token_ids:  # the canary's
            return await chat(messages, return_token_ids, **options)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        if messages[-1]["content"] == "c":
            other.set()
        if messages[-1]["content"] == "b":
            await asyncio.wait_for(other.wait(), 20)
        running -= 1
        return await chat(messages, return_token_ids, **options)

    monkeypatch.setattr(endpoint, "chat", meet)
    write_questions(tmp_path / "second", "c", "d", "e")
    candidate = make_candidate("a")
    serving = candidate.serving.model_copy(update={"concurrency": 2})
    evaluation = run(tmp_path, candidate.model_copy(update={"serving": serving}))
    assert [file.num_cases for file in evaluation.evals.values()] == [2, 3]
    assert list(evaluation.evals) == ["first", "second"]
    assert most == 2


def test_the_error_of_one_eval_ends_the_others_and_their_cases_are_kept(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, num_answered, is_answered = endpoint.chat, itertools.count(1), asyncio.Event()

    async def die(messages: list[dict[str, Any]], **options: Any) -> Reply:
        if messages[-1]["content"] == "a":
            await asyncio.wait_for(is_answered.wait(), 20)
            await asyncio.sleep(0.1)  # both answers are in their journals then
            raise EngineError("gone")
        reply = await chat(messages, **options)
        if next(num_answered) == 2:
            is_answered.set()
        return reply

    def check_alive() -> None:
        raise EngineError("server server-0: killed by signal 9")

    with monkeypatch.context() as patched:
        patched.setattr(endpoint, "chat", die)
        patched.setattr(endpoint, "check_alive", check_alive)
        with pytest.raises(
            EngineError, match=r"^server server-0: killed by signal 9; first: 1 of 2 cases are finished"
        ):
            run(tmp_path)
    assert sorted(endpoint.asked) == ["b", "c"]
    endpoint.asked.clear()
    run(tmp_path)
    assert endpoint.asked == ["a"]


def test_an_endpoint_that_dies_before_the_first_case_is_told_with_what_is_kept(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(*_: Any, **__: Any) -> list[list[int]]:
        raise EngineError("server server-0: killed by signal 9")

    monkeypatch.setattr(endpoint, "tokenize", die)
    with pytest.raises(EngineError, match=r"signal 9; (first|second): .*; finished work is kept, run `dvc repro` to"):
        run(tmp_path)


def test_a_case_that_can_not_fit_is_told_before_any_of_its_eval_is_asked(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    write_questions(tmp_path / "first", "a", "many words " * 600)
    with pytest.raises(SettingsError, match=r"^evals\.first: case 't1' has 1200 tokens; with serving\.max_tokens 128 "):
        run(tmp_path)
    assert "a" not in endpoint.asked


async def write_a_trace(*_: Any, evaluation: Path) -> None:
    (evaluation / "traces").mkdir()
    (evaluation / "traces/server-0.json.gz").write_bytes(b"")


async def fail_to_trace(*_: Any, **__: Any) -> None:
    raise TimeoutError


@pytest.mark.parametrize(("trace", "names"), [(write_a_trace, ["server-0.json.gz"]), (fail_to_trace, [])])
def test_a_trace_lies_beside_the_records_and_none_is_worth_an_evaluation(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, trace: Any, names: list[str]
) -> None:
    monkeypatch.setattr(evaluate_module, "trace_engine", trace)
    assert run(tmp_path, is_traced=True).evals["first"].num_cases == 2
    folder = tmp_path / "build/agent"
    assert [path.name for path in (folder / "evaluations/a/traces").glob("*")] == names
    assert "trace" not in (folder / "evaluations/a/evaluation.json").read_text(), "the gate must not need it"
    assert not (folder / "journal/a/finished/traces").exists(), "nothing of it is taken over"
    endpoint.asked.clear()
    run(tmp_path)
    assert endpoint.asked == [] and not (folder / "evaluations/a/traces").exists()


def read_answers(root: Path) -> list[dict[str, Any]]:
    """Return the records of both evals without their times."""
    folder = root / "build/agent/evaluations/a"
    records = [record for name in ("first", "second") for record in read_cases(folder / f"{name}.jsonl")]
    return [record.model_dump(exclude={"latency_s"}) for record in records]


def serve_shards(endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "start_engine", endpoint.start)
    monkeypatch.setattr(shards_module, "fingerprint", lambda facts: facts["checkpoint"]["digest"])


def ask_shards(root: Path, *shards: Shard) -> None:
    with open_replica(make_candidate("a"), make_product(), root=root, build=root / "build/agent") as replica:
        for shard in shards:
            replica.run(shard)


def test_shards_ask_each_case_once_and_make_the_records_of_one_run(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_shards(endpoint, monkeypatch)
    assert run(tmp_path).shards is None
    alone = read_answers(tmp_path)
    shutil.rmtree(tmp_path / "build")
    endpoint.asked.clear()
    ask_shards(tmp_path, *(Shard(number, 3) for number in (3, 1, 2)))
    assert sorted(endpoint.asked) == ["a", "b", "c"]
    merged = run(tmp_path)
    assert sorted(endpoint.asked) == ["a", "b", "c"] and read_answers(tmp_path) == alone
    assert merged.shards is not None and merged.shards.num_shards == 3
    assert not (tmp_path / "build/agent/shards/a").exists(), "they would be merged into the next evaluation too"


def test_shards_that_are_asked_for_at_once_are_asked_side_by_side(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last cases of a shard are few, and the servers were idle until the next one began."""
    serve_shards(endpoint, monkeypatch)
    chat, at_work, all_there = endpoint.chat, [0], threading.Event()

    async def wait_for_all(messages: list[dict[str, Any]], **options: Any) -> Reply:
        at_work[0] += 1
        if at_work[0] == 3:
            all_there.set()
        assert await asyncio.to_thread(all_there.wait, 20), "a shard waited for another"
        return await chat(messages, **options)

    monkeypatch.setattr(endpoint, "chat", wait_for_all)
    shards = [Shard(number, 2) for number in (1, 2)]
    with (
        open_replica(make_candidate("a"), make_product(), root=tmp_path, build=tmp_path / "build/agent") as replica,
        ThreadPoolExecutor(2) as pool,
    ):
        assert sum(pool.map(replica.run, shards)) == 3
    assert sorted(endpoint.asked) == ["a", "b", "c"]


def test_lm_eval_makes_the_requests_once_for_all_shards_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took a second of each shard."""
    made = []

    def run_task(context: Any, model: Any) -> list[Any]:
        made.append((context.name, context.settings.num_fewshot))
        assert model.loglikelihood(["one", "two"]) == [(0.0, False)] * 2
        assert model.generate_until(["three"]) == [""] and model.loglikelihood_rolling([context.name]) == [0.0]
        return []

    monkeypatch.setattr(harness, "_run_task", run_task)
    monkeypatch.setattr(harness, "_RECORDED", {})
    evals = [(name, HarnessEval(kind="harness", task="t", num_fewshot=n)) for name, n in (("e", 0), ("f", 0), ("e", 5))]
    for name, settings in evals * 3:
        context: Any = SimpleNamespace(name=name, settings=settings)
        requests = harness._record_requests(context, None)  # type: ignore[arg-type]
        assert requests == {
            "loglikelihood": ["one", "two"],
            "generate_until": ["three"],
            "loglikelihood_rolling": [name],
        }
    assert made == [("e", 0), ("f", 0), ("e", 5)], "once each"


def test_the_requests_of_a_shard_are_those_that_lm_eval_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, in its order: who shares a request may change a last bit."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(harness, "_RECORDED", {})
    settings = HarnessEval(kind="harness", task="choices", include_path="evalsets/choices")
    context: Any = SimpleNamespace(name="choices", settings=settings)
    requests = harness._record_requests(context, None)  # type: ignore[arg-type]
    with Path("evalsets/choices/cases.jsonl").open() as file:
        cases = [json.loads(line) for line in file]
    expected = [(case["question"], choice) for case in cases for choice in case["choices"]]
    assert list(requests) == ["loglikelihood"]
    asked = [(context, answer.strip()) for context, answer in (request.args for request in requests["loglikelihood"])]
    assert asked == expected


@pytest.mark.parametrize("is_traced", [False, True])
def test_the_endpoint_of_the_shards_makes_the_evaluation(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, is_traced: bool
) -> None:
    """Loading 70B once more takes minutes. One that is traced must be told so when it starts."""
    assert run(tmp_path).shards is None
    alone = read_answers(tmp_path)
    shutil.rmtree(tmp_path / "build")
    serve_shards(endpoint, monkeypatch)
    started = []

    def start(*args: Any, **options: Any) -> Any:
        started.append(options)
        return endpoint.start()

    monkeypatch.setattr(evaluate_module, "start_engine", start)
    monkeypatch.setattr(evaluate_module, "trace_engine", lambda *_, **__: asyncio.sleep(0))
    product = make_product()
    traced = {name: one.model_copy(update={"trace": is_traced}) for name, one in product.candidates.items()}
    product = product.model_copy(update={"candidates": traced})
    build = tmp_path / "build/agent"
    with open_replica(make_candidate("a"), product, root=tmp_path, build=build) as replica:
        replica.run(Shard(2, 2))
        replica.run(Shard(1, 2))
        replica.finish([])
    assert read_answers(tmp_path) == alone and len(started) == is_traced


class EchoingEndpoint(FakeEndpoint):
    """Answers the canary with its question, and counts how often it is asked.

    How sure it is of a token depends on who else is scored with it, as it does of a real one in the last digits.
    """

    def __init__(self, fingerprint: str = "f1") -> None:
        super().__init__()
        self.fingerprint = fingerprint
        self.canary: list[str] = []

    async def chat(self, messages: list[dict[str, Any]], return_token_ids: bool = False, **_: Any) -> Reply:
        reply = await super().chat(messages, return_token_ids)
        if not return_token_ids:
            return reply
        question = messages[-1]["content"]
        self.canary.append(question)
        return dataclasses.replace(reply, text=question, token_ids=(4, 0), prompt_token_ids=(1, 2, 3))

    async def score(self, batch: list[list[int]], **_: Any) -> list[Any]:
        sizes = [len(tokens) for tokens in batch]
        return [SimpleNamespace(top_logprobs=np.full((n - 1, 2), [len(batch) + i, 0.0])) for i, n in enumerate(sizes)]


def finish_with_parts(
    root: Path, endpoints: list[EchoingEndpoint], monkeypatch: pytest.MonkeyPatch, lost: int | None = None
) -> None:
    """Evaluate by replicas with an endpoint each, of which the first ran all shards; one part may be lost."""
    product, candidate = make_product(), make_candidate("a")
    with contextlib.ExitStack() as stack:
        replicas = []
        for number, endpoint in enumerate(endpoints):
            serve_shards(endpoint, monkeypatch)
            build = root / ("build/agent" if number == 0 else f"other-{number}")
            replicas.append(stack.enter_context(open_replica(candidate, product, root=root, build=build)))
        replicas[0].run(Shard(1, 1))
        parts = [replica.prepare(number, len(replicas)) for number, replica in enumerate(replicas, 1)]
        replicas[0].finish([part for i, part in enumerate(parts) if part is not None and i != lost])


def test_what_is_lost_of_the_canary_alone_is_asked_again(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = [EchoingEndpoint() for _ in range(3)]
    finish_with_parts(tmp_path, endpoints, monkeypatch, lost=1)
    assert [sorted(each.canary) for each in endpoints] == [sorted("ab" * 3), ["b"] * 3, ["c"] * 3]
    lines = (tmp_path / "build/agent/evaluations/a/canary.jsonl").read_text().splitlines()
    assert [json.loads(line)["case_id"] for line in lines] == ["first/t0", "first/t1", "second/t0"]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_the_canary_of_several_replicas_is_that_of_one(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, num_replicas: int
) -> None:
    """One replica asked all of it while the others waited."""
    whole = EchoingEndpoint()
    monkeypatch.setattr(evaluate_module, "start_engine", whole.start)
    run(tmp_path)
    file = tmp_path / "build/agent/evaluations/a/canary.jsonl"
    expected = file.read_bytes()
    assert sorted(whole.canary) == sorted("abc" * 3) and expected.count(b"\n") == 3
    assert [json.loads(line)["margins"] for line in expected.splitlines()] == [
        {"loaded": [n, n]} for n in (3.0, 4.0, 5.0)
    ]
    shutil.rmtree(tmp_path / "build")
    endpoints = [EchoingEndpoint() for _ in range(num_replicas)]
    finish_with_parts(tmp_path, endpoints, monkeypatch)
    assert file.read_bytes() == expected
    assert sorted(text for each in endpoints for text in each.canary) == sorted(whole.canary), "each is asked as often"
    assert sum(bool(each.canary) for each in endpoints) == min(3, num_replicas)


def test_a_part_of_the_canary_from_another_endpoint_is_refused(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EvidenceError, match="canary: expected all answers of fingerprint f1, got some of f2; run "):
        finish_with_parts(tmp_path, [EchoingEndpoint(), EchoingEndpoint("f2")], monkeypatch)


@pytest.mark.parametrize("change", ["openai", "speculative", "trace"])
def test_where_alone_would_not_be_alone_or_one_endpoint_is_not_enough_the_canary_is_not_divided(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Replicas that are attached to one server would be in flight there at once."""
    serve_shards(endpoint, monkeypatch)
    product, candidate = make_product(), make_candidate("a")
    if change == "trace":
        traced = {name: one.model_copy(update={"trace": True}) for name, one in product.candidates.items()}
        product = product.model_copy(update={"candidates": traced})
    else:
        update = {"engine": "openai"} if change == "openai" else {"speculative": {"method": "ngram"}}
        candidate = candidate.model_copy(update={"serving": candidate.serving.model_copy(update=update)})
    with open_replica(candidate, product, root=tmp_path, build=tmp_path / "build/agent") as replica:
        assert replica.prepare(1, 2) is None


def test_a_shard_that_failed_says_so_and_goes_on(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_shards(endpoint, monkeypatch)
    endpoint.broken = {"b"}
    with pytest.raises(EvidenceError, match=r"a: shard 1/1: first: 1 of 2 cases have no judgement"):
        ask_shards(tmp_path, Shard(1, 1))
    with pytest.raises(EvidenceError, match=r"expected 1 finished shards, found 0; missing: 1"):
        run(tmp_path)
    endpoint.broken.clear()
    endpoint.asked.clear()
    ask_shards(tmp_path, Shard(1, 1))
    assert endpoint.asked == ["b"], "what was judged is not asked again"
    counts = run(tmp_path).shards
    assert counts is not None and (counts.num_attempts, counts.num_unfinished) == (2, 1)
