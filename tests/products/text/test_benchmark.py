"""The benchmark against two fake servers: what is sent to whom and when, and what refuses it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import EngineError, EvidenceError, SettingsError
from pipeline.products.text.benchmark import audits, matched_work, prompts
from pipeline.products.text.benchmark.audits import read_gpu_memory_mib, read_peak_memory_mib
from pipeline.products.text.benchmark.prefix_cache import NUM_PROBES
from pipeline.products.text.benchmark.probes import find_own_start, read_text
from pipeline.products.text.serving.client import Client
from pipeline.products.text.settings import TextProduct
from pipeline.records.benchmarks import Benchmark
from pipeline.records.evaluations import BuiltCandidate, Candidate
from pipeline.records.record_files import read_record, write_record
from pipeline.records.speculation import SpeculativeConfig
from tests.evalsets.test_evalsets import write
from tests.fakes.synthetic_records import make_candidate, make_params, write_candidate
from tests.products.text.test_client import FakeServer, answer
from tests.products.text.test_evaluate import CALL, FakeEndpoint, write_questions
from tests.products.text.test_evaluate import endpoint as endpoint
from tests.products.text.test_evaluate import run as evaluate
from tests.products.text.test_streaming import chunk, stream, usage

BATCH = 4  # the least: a cell of one request in flight has as many
BENCHMARK = {
    "candidates": ["a"],
    "concurrency": [1, 3],
    "prompt_tokens": [[1, 5], [6, 20]],
    "num_tokens": 8,
    "rounds": 6,
}
NEEDED = 7 * (BATCH + BATCH) + NUM_PROBES  # prompts of a band: warm-up and six rounds of two cells, and probes
QUESTIONS = [f"q{i} " + "word " * words for words in (1, 8) for i in range(NEEDED)]


@dataclass
class World:
    """Two fake servers, what they were sent, and what one of them does otherwise than expected."""

    root: Path
    sent: list[tuple[str, str]] = field(default_factory=list)  # (model, question) of each streamed request
    changes: dict[str, Any] = field(default_factory=dict)  # of one side: num_tokens, num_prompt, text, ...
    changed_side: str = "candidate"  # the side that has the changes
    settings: dict[str, Any] = field(default_factory=dict)
    serving: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    heads: list[str] = field(default_factory=list)  # of the requests to one server after the other

    @property
    def params(self) -> TextProduct:
        data = make_params(["a"], ["a"], benchmark=BENCHMARK | self.settings).model_dump()
        data["evals"] = {name: {"kind": "tool_calls", "evalset": name} for name in ("first", "second")}
        data["serving"] |= self.serving
        data["gate"] |= {"tolerances": {"first/tool_call_exact_match": {"overall": 0.1}}, "tripwires": {}}
        return TextProduct.model_validate(data)

    def run(self) -> Benchmark:
        work = matched_work.run_benchmark("a", self.params, root=self.root, build=self.root / "build/agent")
        return asyncio.run(work)

    @contextlib.asynccontextmanager
    async def start(
        self, candidate: Candidate, *_: Any, num_engines: int, engine_index: int, **__: Any
    ) -> AsyncIterator[tuple[Any, Client]]:
        # two servers of two engines: where there are two GPUs, each has one
        assert (num_engines, engine_index) == (2, int(candidate.name == "a"))
        changes = self.changes if (candidate.name == "a") == (self.changed_side == "candidate") else {}

        async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            if "prompt" in body:
                return await answer(200, {"tokens": [[0] * len(text) for text in body["prompt"]]})(body, writer)
            question = body["messages"][-1]["content"]
            num_prompt = len(question.split())
            if not body.get("stream"):
                return await answer(200, {"tokens": [0] * num_prompt})(body, writer)
            self.sent.append((body["model"], question))
            if "remembers" in changes and question not in changes["remembers"]:
                changes["remembers"].append(question)
                await asyncio.sleep(0.1)  # well above what a busy machine adds
            text = changes.get("text", CALL + "and more")
            if changes.get("at_once"):
                return await stream(chunk(text, finish="length"), usage(body["max_tokens"], num_prompt))(body, writer)
            events = [
                chunk(text[:9]),
                chunk(text[9:]),
                chunk(finish="length"),
                usage(changes.get("num_tokens", body["max_tokens"]), changes.get("num_prompt", num_prompt)),
            ]
            await stream(*events)(body, writer)

        async with (
            FakeServer(behave) as server,
            Client([server.url], candidate.name, concurrency=8, timeout_s=5, api_key=self.api_key) as c,
        ):
            yield (
                SimpleNamespace(
                    base_urls=(server.url,),
                    model=candidate.name,
                    processes=(),
                    check_alive=lambda: None,
                    api_key=self.api_key,
                    fingerprint=changes.get("fingerprint", "f1"),
                    facts=changes.get("facts", {"engine": {}, "hardware": {"device": "cpu x86_64"}}),
                ),
                c,
            )
            self.heads += server.heads


@pytest.fixture
def world(tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> World:
    """A reference and a candidate that were built and evaluated."""
    write_questions(tmp_path / "first", *QUESTIONS)
    for name in ("reference", "a"):
        evaluate(tmp_path, make_candidate(name))
        write_candidate(tmp_path / "build/agent", make_candidate(name))
    world = World(tmp_path)
    # these answer from memory
    monkeypatch.setattr(audits, "MIN_INTER_TOKEN_LATENCY_MS", 1e-9)
    monkeypatch.setattr(matched_work, "start_engine", world.start)
    # these answer in microseconds, which are noise on a busy machine: a cache is looked for where a test plants one
    find_hits = matched_work.find_prefix_cache_hits
    monkeypatch.setattr(
        matched_work,
        "find_prefix_cache_hits",
        lambda *probed, **named: find_hits(*probed, **named) if "remembers" in world.changes else None,
    )
    return world


def test_both_sides_do_the_same_work_in_turn_and_no_prompt_is_repeated(world: World) -> None:
    benchmark = world.run()
    assert benchmark.refusal is None
    probes = world.sent[8 * BATCH : 8 * BATCH + 2 * 2 * 2 * NUM_PROBES]
    others = world.sent[: 8 * BATCH] + world.sent[8 * BATCH + len(probes) :]
    batches = [others[i : i + BATCH] for i in range(0, len(others), BATCH)]
    warm_up, timed, repeats = batches[:8], batches[8:-2], batches[-2:]
    assert all(len({model for model, _ in batch}) == 1 for batch in batches)
    # six rounds of four cells, and who begins changes from round to round
    first = [[cell[0][0][0] for cell in zip(timed[i : i + 8 : 2], strict=True)] for i in range(0, len(timed), 8)]
    assert first == [["reference"] * 4, ["a"] * 4] * 3
    for one, other in zip(timed[::2], timed[1::2], strict=True):
        assert sorted(q for _, q in one) == sorted(q for _, q in other)
    sent = Counter(world.sent) - Counter(request for batch in repeats for request in batch)
    assert set(sent.values()) == {1} and len(sent) == 2 * 2 * (NEEDED + NUM_PROBES)
    assert {q for b in repeats for _, q in b} <= {q for b in timed for _, q in b}
    assert not {q for b in warm_up for _, q in b} & {q for b in timed for _, q in b}


def test_probes_come_in_turn_with_copies_that_nobody_had_asked(world: World) -> None:
    """Each server has copies of its own: one cache behind both would know what the first was asked."""
    world.run()
    probes = world.sent[8 * BATCH : 8 * BATCH + 2 * 2 * 2 * NUM_PROBES]
    known = [(model, question) for model, question in probes if question in QUESTIONS]
    fresh = [(model, question) for model, question in probes if question not in QUESTIONS]
    assert len({q for _, q in known}) == 2 * NUM_PROBES and Counter(m for m, _ in known) == {
        "reference": 2 * NUM_PROBES,
        "a": 2 * NUM_PROBES,
    }
    assert len({q for _, q in fresh}) == len(fresh) == len(known)
    assert [q in QUESTIONS for _, q in probes[:8]] == [True, False, False, True] * 2
    assert [len(q.split()) for _, q in known] == [len(q.split()) for _, q in fresh]


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_server_that_was_asked_the_timed_prompts_before_is_refused(world: World, side: str) -> None:
    """The evals ask them minutes earlier: TTFT from a prefix cache is nobody's."""
    world.changed_side, world.changes = side, {"remembers": list(QUESTIONS)}
    refusal = world.run().refusal
    assert refusal is not None and refusal.startswith(
        f"{side}, 1 to 5 prompt tokens: the server knew the timed prompts, which take 0."
    ), refusal
    assert "expected 0.9 or more; turn its prefix cache off" in refusal and "\n" not in refusal


def test_a_cache_that_knows_none_of_the_timed_prompts_is_harmless(world: World) -> None:
    """Started after the evals: a prompt sent again is fast, and none is in the rounds."""
    world.changes = {"remembers": []}
    world.settings = {"concurrency": [3], "prompt_tokens": [[6, 20]]}
    benchmark = world.run()
    assert benchmark.refusal is None and benchmark.candidate is not None
    assert benchmark.candidate.repeat_ttft_ratio < 0.5


def test_a_copy_differs_where_a_prompt_begins_to_be_its_own() -> None:
    """A preamble that users share too is cached for known and fresh alike: it is no sign of memory."""
    preamble = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Rules: none. Do task "}]
    asked = [
        prompts.Prompt("e", str(n), [preamble[0], preamble[1] | {"content": f"Rules: none. Do {n} tasks"}], None)
        for n in range(100, 160)
    ]
    texts = sorted(map(read_text, asked))
    assert {find_own_start(prompt, texts) for prompt in asked} == {(1, len("Rules: none. Do "))}
    alone = prompts.Prompt("e", "x", [{"role": "user", "content": "Hello there"}], None)
    assert find_own_start(alone, sorted([*texts, read_text(alone)])) == (0, 0)


def test_an_answer_that_comes_at_once_is_refused(world: World) -> None:
    """It has no inter-token latency, and a ratio of none is no number."""
    world.changes = {"at_once": True}
    refusal = world.run().refusal
    assert refusal is not None and "expected tokens one after the other, got all tokens of an answer at once" in refusal


def test_the_result_holds_every_round_and_what_the_audits_found(world: World) -> None:
    benchmark = world.run()
    assert [(cell.concurrency, cell.prompt_tokens) for cell in benchmark.cells] == [
        (1, (1, 5)),
        (3, (1, 5)),
        (1, (6, 20)),
        (3, (6, 20)),
    ]
    assert all(len(cell.reference) == len(cell.candidate) == 6 for cell in benchmark.cells)
    assert benchmark.candidate is not None and benchmark.candidate.peak_memory_mib is None, "not ours to look into"
    assert (benchmark.candidate.num_requests, benchmark.candidate.num_changed) == (6 * 4 * BATCH, 0)
    assert benchmark.candidate.repeat_ttft_ratio > 0
    assert "completion tokens less one" in benchmark.definitions
    path = world.root / "benchmark.json"
    write_record(path, benchmark)
    assert read_record(path, Benchmark) == benchmark


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_tokens": 7}, "expected 8 completion tokens, as every request decodes, got 7"),
        ({"text": "{"}, "expected a text of about 8 tokens, as the server says, got '{' with 1"),
        ({"num_prompt": 21}, "expected 1 to 5 prompt tokens, got 21"),
        ({"text": "Sorry, no."}, 'answered \'Sorry, no.\', evaluated was \'{"name": "order"'),
    ],
)
def test_work_that_is_not_equal_is_refused_without_a_number(world: World, change: dict[str, Any], said: str) -> None:
    world.changes = change
    benchmark = world.run()
    assert benchmark.refusal is not None and benchmark.cells == () and benchmark.candidate is None
    assert benchmark.refusal.startswith("candidate, 1 in flight, 1 to 5 prompt tokens: first/t")
    assert said in benchmark.refusal


def test_another_server_than_the_evaluated_one_is_refused(world: World) -> None:
    world.changes = {"fingerprint": "f2"}
    assert world.run().refusal == ("candidate: its server has the fingerprint f2, evaluated was f1; run `dvc repro`")
    assert world.sent == []


def test_in_reduced_precision_changed_answers_are_counted(world: World) -> None:
    """There the composition of a batch alone flips an answer."""
    world.serving, world.changes = {"dtype": "bfloat16"}, {"text": "Sorry, no."}
    benchmark = world.run()
    assert benchmark.refusal is None and benchmark.candidate is not None and benchmark.reference is not None
    assert (benchmark.reference.num_changed, benchmark.candidate.num_changed) == (0, 6 * 4 * BATCH)


def test_an_answer_cut_before_the_evaluated_one_ends_is_the_same(world: World) -> None:
    world.changes = {"text": CALL[:20]}
    assert world.run().refusal is None


def test_drafts_that_never_came_are_refused(world: World) -> None:
    path = world.root / "build/agent/candidates/a/candidate.json"
    drafts = SpeculativeConfig(method="prompt_lookup", num_tokens=2)
    write_record(path, read_record(path, BuiltCandidate).model_copy(update={"speculative": drafts}))
    assert world.run().refusal == "candidate: expected drafted tokens, as it is served with speculation, got none"


def test_too_few_prompts_are_told_with_how_many_it_takes(world: World) -> None:
    world.settings = {"rounds": 8}
    with pytest.raises(
        SettingsError,
        match=r"^benchmark\.prompt_tokens\.0: expected 92 distinct prompts of 1 to 5 "
        r"tokens, so that none is sent twice, found 77 in the evals",
    ):
        world.run()


def test_an_evalset_that_was_edited_since_is_refused(world: World) -> None:
    write_questions(world.root / "first", *QUESTIONS, "new")
    with pytest.raises(EvidenceError, match="first: expected the cases that were evaluated, found others"):
        world.run()


def test_a_server_that_fails_ends_the_stage(world: World) -> None:
    world.changes = {"num_tokens": None}
    with pytest.raises(EngineError, match="expected a stream with content"):
        world.run()


@pytest.mark.parametrize("url", ["http://there:8000/", "http://there:8000/v1", "http://there:8000/v1/"])
def test_one_server_for_both_sides_is_refused(world: World, url: str) -> None:
    data = world.params.model_dump()
    for name, base_url in (("reference", "http://there:8000/"), ("a", url)):
        engine = {"kind": "openai", "base_url": base_url, "model": "m"}
        data["candidates"][name] |= {"engine": engine, "steps": []}
        write_candidate(world.root / "build/agent", make_candidate(name).model_copy(update={"steps": ()}))
    work = matched_work.run_benchmark(
        "a", TextProduct.model_validate(data), root=world.root, build=world.root / "build/agent"
    )
    with pytest.raises(SettingsError, match=r"^candidates\.a\.engine\.base_url: expected another server than the "):
        asyncio.run(work)


def test_timed_requests_carry_the_key_of_an_endpoint_that_asks_for_one(world: World) -> None:
    world.api_key = "secret"
    assert world.run().refusal is None
    assert len(world.heads) > len(world.sent)
    assert all("authorization: bearer secret" in head for head in world.heads)


def test_cases_that_ask_the_same_are_one_prompt(world: World) -> None:
    """As cases they differ in what they expect; sent both, the second would come from a cache."""
    case = {"messages": [{"role": "user", "content": "same"}], "cluster": "c"}
    write(
        world.root / "first",
        "tool_calls",
        [case | {"id": str(n), "expected": {"name": "order", "arguments": {"n": n}}} for n in range(3)],
    )
    found = prompts.load_prompts(world.params, world.root)
    assert sorted(read_text(p) for p in found) == ["c", "same"]


def test_memory_of_a_process_and_its_children_is_added_up() -> None:
    async def measure() -> tuple[float | None, float | None]:
        code = "import subprocess, sys; print(flush=True); sys.stdin.read()"
        parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {json.dumps(code)}])"
        pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        alone = await asyncio.create_subprocess_exec(sys.executable, "-c", code, **pipes)
        family = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, **pipes)
        for process in (alone, family):
            assert process.stdout is not None
            await process.stdout.readline()
        first, second = (read_peak_memory_mib([process.pid]) for process in (alone, family))
        for process in (alone, family):
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
        return first, second

    alone, family = asyncio.run(measure())
    if alone is not None and family is not None:  # Linux tells
        assert alone > 1 and family > 1.7 * alone
    assert read_peak_memory_mib([]) is None


def test_gpu_memory_is_that_of_our_processes_and_their_children() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdout.readline()
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent.pid)], capture_output=True, text=True).stdout
        rows = f"1, 900\n{parent.pid}, 16\n{listed.split()[0]}, 70000\n2, [N/A]\n"
        assert read_gpu_memory_mib([parent.pid], query=lambda: rows) == 70016
        assert read_gpu_memory_mib([parent.pid], query=lambda: "1, 900\n") is None, "it runs on no GPU"
        parent.stdin.close()
    assert read_gpu_memory_mib([], query=lambda: rows) is None
