"""What stands round a scored text: one BOS, as the model was trained, whatever the tokenizer adds by itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from pipeline.errors import CheckpointError, EngineError, NonsenseError, RequestError, SettingsError
from pipeline.evalsets.cards import load_evalset
from pipeline.products.text.evals import endpoint_lm, perplexity
from pipeline.products.text.evals.bridge import Bridge
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.endpoint_lm import EndpointLM
from pipeline.products.text.evals.framing import read_frame
from pipeline.products.text.evals.places import Places
from pipeline.products.text.serving.client import TokenScores
from pipeline.products.text.serving.scoring import score_sequences
from pipeline.products.text.settings import HarnessEval, PerplexityEval
from pipeline.running.journal import Journal, read_entries
from pipeline.running.shards import Shard
from tests.fakes.tiny_llama import TEXTS, write_documents, write_tiny_llama

CONTEXT = 32
BOS, END = "<|bos|>", "<|end|>"
DOCUMENTS = [*TEXTS, "a", " ".join(TEXTS), f"{BOS}The courier takes the parcel."]
PAIRS = [
    ("The courier", " takes the parcel"),
    ("A parcel of", " pears"),
    (f"{BOS}A list", " of items"),
    ("", "A list"),
    ("The total is ", "42"),
    ("The market", "!"),
]
TOO_LONG = (TEXTS[3], "!")
TEMPLATES = {"none": "$A", "bos": f"{BOS} $A", "eos": f"$A {END}", "both": f"{BOS} $A {END}"}
MAX_DIFFERENCE_NATS = 1e-5  # per token, float32 against float64


class InProcess:
    """A client in front of a model of this process, with the tokenizer and the scoring of the embedded server."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    async def tokenize(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]

    async def score(self, batch: list[list[int]], *, top_logprobs: int) -> list[TokenScores]:
        scores = score_sequences(self.model, batch, num_top=top_logprobs)
        return [TokenScores(s.token_logprobs, s.top_ids, s.top_logprobs) for s in scores]

    def check_alive(self) -> None:
        """This endpoint never dies."""


@dataclass
class Setup:
    """A checkpoint whose tokenizer adds something to a text, or nothing."""

    adds: str
    folder: Path
    client: InProcess
    bos: int
    end: int

    def plain(self, text: str) -> list[int]:
        ids: list[int] = self.client.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def make_context(self, tmp_path: Path, settings: Any) -> EvalContext:
        evalset = None if isinstance(settings, HarnessEval) else load_evalset(Path(settings.evalset))
        journal = Journal(tmp_path / "journal", fingerprint="f", key="k")
        return EvalContext(
            name="e",
            settings=settings,
            evalset=evalset,
            client=self.client,  # type: ignore[arg-type]  # no server: the model in this process
            journal=journal,
            checkpoint=self.folder,
            folder=tmp_path,
            places=Places(4),
            max_tokens=8,
            context_length=CONTEXT,
            fingerprint="f",
        )


@pytest.fixture(scope="module", params=TEMPLATES)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_llama(tmp_path_factory.mktemp(request.param) / "tiny", initializer_range=0.2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    specials = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, END)]
    if request.param != "none":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=TEMPLATES[request.param], special_tokens=specials
        )
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)  # as it comes from disk
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yield Setup(request.param, folder, InProcess(model, tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)


def sum_last(model: Any, window: list[int], count: int) -> float:
    """Return the nats of a window's last tokens, in float64."""
    with torch.inference_mode():
        logprobs = torch.log_softmax(model.double()(torch.tensor([window[:-1]])).logits[0], dim=-1)
    model.float()
    return math.fsum(-float(logprobs[i - 1, window[i]]) for i in range(len(window) - count, len(window)))


def sum_nll(model: Any, first: int, tokens: list[int]) -> float:
    """Return the nats of tokens behind `first`: in windows as long as the context, the last one moved left."""
    ids, nats = [first, *tokens], []
    for start in range(1, len(ids), CONTEXT):
        stop = min(start + CONTEXT, len(ids))
        nats.append(sum_last(model, ids[max(0, stop - 1 - CONTEXT) : stop], stop - start))
    return math.fsum(nats)


def test_a_document_is_predicted_behind_one_bos_as_a_float64_loop_says(setup: Setup, tmp_path: Path) -> None:
    write_documents(tmp_path / "set", {"prose": DOCUMENTS})
    settings = PerplexityEval(kind="perplexity", evalset=str(tmp_path / "set"))
    records = asyncio.run(perplexity.evaluate(setup.make_context(tmp_path, settings)))
    for record, text in zip(records, DOCUMENTS, strict=True):
        tokens = setup.plain(text.removeprefix(BOS)) + ([setup.end] if setup.adds in ("eos", "both") else [])
        assert record.scores["num_tokens"] == len(tokens)
        expected = sum_nll(setup.client.model, setup.bos, tokens)
        assert abs(record.scores["nll_nats"] - expected) < MAX_DIFFERENCE_NATS * len(tokens), text


def test_other_evals_go_on_while_arrays_are_written(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 MiB take most of a second, which the latencies of all that was asked then would have in them."""
    went_on = threading.Event()
    write_documents(tmp_path / "set", {"prose": DOCUMENTS})
    settings = PerplexityEval(kind="perplexity", evalset=str(tmp_path / "set"))

    async def score() -> None:
        loop = asyncio.get_running_loop()

        def write(path: Path, encoded: list[str]) -> None:
            loop.call_soon_threadsafe(went_on.set)
            assert went_on.wait(5) and len(encoded) == len(DOCUMENTS)

        monkeypatch.setattr(perplexity, "_write_arrays", write)
        context = setup.make_context(tmp_path, settings)
        with context.journal:
            await perplexity.evaluate(context)

    asyncio.run(score())
    assert went_on.is_set()


def test_arrays_are_packed_and_equal_ones_are_equal_bytes(tmp_path: Path) -> None:
    """What DVC keeps of a candidate is mostly these; a time of day in them would make each run another result."""
    ids = np.arange(60_000, dtype=np.int32).reshape(-1, 20) % 500
    scores = TokenScores(np.zeros(3_000, np.float32), ids, np.zeros((3_000, 20), np.float32))
    encoded = [perplexity._encode([scores])]
    for name in ("first", "second"):
        perplexity._write_arrays(tmp_path / name, encoded)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert (tmp_path / "first").stat().st_size < ids.nbytes / 2
    with np.load(tmp_path / "first") as kept:
        assert kept["offsets"].tolist() == [0, 3_000] and (kept["top_ids"] == ids).all()


def ask(setup: Setup, tmp_path: Path, kind: str, arguments: list[Any]) -> list[Any]:
    async def run() -> Any:
        settings = HarnessEval(kind="harness", task="t")
        context = setup.make_context(tmp_path, settings)
        model = await asyncio.to_thread(EndpointLM, context, Bridge())
        requests = [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]
        return await asyncio.to_thread(getattr(model, kind), requests)

    return list(asyncio.run(run()))


def test_lm_eval_s_requests_are_answered_behind_one_bos(setup: Setup, tmp_path: Path) -> None:
    """A question that its tokenizer begins with BOS has it; every token of the answer is asked about, and no other."""
    for (context, answer), (value, _) in zip(PAIRS, ask(setup, tmp_path, "loglikelihood", PAIRS), strict=True):
        has_bos = setup.adds in ("bos", "both") or context.startswith(BOS) or not context
        head = [setup.bos] if has_bos else []
        question = setup.plain(context.removeprefix(BOS).rstrip())
        whole = setup.plain((context + answer).removeprefix(BOS))
        expected = sum_last(setup.client.model, head + whole, len(whole) - len(question))
        assert abs(-value - expected) < MAX_DIFFERENCE_NATS * len(whole), (context, answer)


def test_a_question_that_would_lose_its_beginning_is_refused_before_any_is_asked(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions of which the server read the last words alone passed the gate, and nobody said so."""
    tokens = len(setup.plain("".join(TOO_LONG))) + (setup.adds in ("bos", "both")) - 1
    assert tokens > CONTEXT
    monkeypatch.setattr(setup.client, "score", lambda *_, **__: pytest.fail("a question was asked"))
    said = (
        f"evals.e: the question of case 'None-None' is too long: with an answer {tokens} tokens, above "
        f"serving.context_length {CONTEXT}; raise the length, lower num_fewshot, or shorten the case"
    )
    with pytest.raises(SettingsError) as caught:
        ask(setup, tmp_path, "loglikelihood", [*PAIRS, TOO_LONG])
    assert str(caught.value) == said


@pytest.mark.parametrize(("beyond", "is_refused"), [(0, False), (1, True)])
def test_a_question_may_fill_the_context_to_the_last_token(
    setup: Setup, tmp_path: Path, beyond: int, is_refused: bool
) -> None:
    head = setup.adds in ("bos", "both")
    texts = ("q" * n for n in range(1, 100))
    context = next(text for text in texts if len(setup.plain(f"{text} yes")) + head - 1 == CONTEXT + beyond)
    with pytest.raises(SettingsError, match="is too long: with an answer ") if is_refused else contextlib.nullcontext():
        ask(setup, tmp_path, "loglikelihood", [(context, " yes")])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EngineError("gone"), "gone; e: 2 of 6 requests are finished and kept, run `dvc repro` to go on"),
        (RequestError("refused"), "refused"),
    ],
)
def test_an_endpoint_that_dies_is_told_with_what_is_kept(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: EngineError, said: str
) -> None:
    monkeypatch.setattr(endpoint_lm, "CHUNK_REQUESTS", 2)
    monkeypatch.setattr(endpoint_lm, "CHUNKS_AHEAD", 1)
    score, calls = setup.client.score, itertools.count()

    async def die(batch: list[list[int]], *, top_logprobs: int) -> list[TokenScores]:
        if next(calls):
            raise error
        return await score(batch, top_logprobs=top_logprobs)

    monkeypatch.setattr(setup.client, "score", die)
    with pytest.raises(type(error)) as caught:
        ask(setup, tmp_path, "loglikelihood", PAIRS)
    assert str(caught.value) == said


@pytest.mark.parametrize("asks", ["what a tokenizer adds", "texts"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            EngineError("gone"),
            "gone; e: its requests were in preparation; finished work is kept, run `dvc repro` to go on",
        ),
        (NonsenseError("no ids"), "no ids"),
    ],
)
@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until", "perplexity"])
def test_an_endpoint_that_dies_before_an_eval_asks_is_told_with_what_is_kept(
    setup: Setup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    error: EngineError,
    said: str,
    asks: str,
) -> None:
    """Who read that a server was killed did not learn that hours of finished evals are there."""
    tokenize = setup.client.tokenize

    async def die(texts: list[str], **options: Any) -> list[list[int]]:
        if asks != "texts" or max(map(len, texts)) > len(BOS):
            raise error
        return await tokenize(texts, **options)

    monkeypatch.setattr(setup.client, "tokenize", die)
    monkeypatch.setattr(setup.client, "tokenize_chat", lambda *_, **__: die([TOO_LONG[0]]), raising=False)
    write_documents(tmp_path / "set", {"prose": DOCUMENTS})
    settings = PerplexityEval(kind="perplexity", evalset=str(tmp_path / "set"))
    generate = {"until": [], "do_sample": False}
    with pytest.raises(type(error)) as caught:
        if kind == "perplexity":
            asyncio.run(perplexity.evaluate(setup.make_context(tmp_path, settings)))
        else:
            ask(setup, tmp_path, kind, [TOO_LONG if kind == "loglikelihood" else (TOO_LONG[0], generate)])
    assert str(caught.value) == said


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_task_that_ends_in_the_middle_ends_with_chunks_that_nobody_began(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """`as_completed` never hears of a future that the pool's own shutdown cancels."""
    monkeypatch.setattr(endpoint_lm, "CHUNK_REQUESTS", 2)
    monkeypatch.setattr(endpoint_lm, "CHUNKS_AHEAD", 1)
    is_asked = asyncio.Event()

    async def end(batch: list[list[int]], *, top_logprobs: int) -> list[TokenScores]:
        is_asked.set()
        await asyncio.sleep(0.05 if how == "fails" else 60)
        raise EngineError("gone")

    monkeypatch.setattr(setup.client, "score", end)
    pairs = [(f"a question {i}", " yes") for i in range(40)]

    async def run() -> None:
        context, bridge = setup.make_context(tmp_path, HarnessEval(kind="harness", task="t")), Bridge()
        model = await asyncio.to_thread(EndpointLM, context, bridge)
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        asking = asyncio.ensure_future(asyncio.to_thread(model.loglikelihood, requests))
        await asyncio.wait_for(is_asked.wait(), 20)
        if how == "is cancelled":
            bridge.close()
        await asyncio.wait([asking], timeout=20)
        assert asking.done(), "it hangs"  # and so does the end of this test then: a thread can't be ended
        assert isinstance(asking.exception(), EngineError) if how == "fails" else asking.cancelled()

    asyncio.run(run())


def test_of_equal_requests_the_first_one_counts_whichever_is_answered_first(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who shares a request may change a last bit, and two runs must give the same bytes."""
    monkeypatch.setattr(endpoint_lm, "CHUNK_REQUESTS", 2)
    monkeypatch.setattr(endpoint_lm, "CHUNKS_AHEAD", 2)
    pairs = [("one", " yes"), ("two", " yes"), ("one", " yes"), ("three", " yes")]
    plain = setup.client.score

    async def shift(batch: list[list[int]], *, top_logprobs: int) -> list[TokenScores]:
        scores = await plain(batch, top_logprobs=top_logprobs)
        is_first = str(setup.plain("three yes"))[1:-1] not in str(batch)
        await asyncio.sleep(0.5 if is_first else 0)
        return [replace(s, token_logprobs=s.token_logprobs - (1 if is_first else 2)) for s in scores]

    monkeypatch.setattr(setup.client, "score", shift)
    values = [value for value, _ in ask(setup, tmp_path, "loglikelihood", pairs)]
    monkeypatch.setattr(setup.client, "score", plain)
    exact = [value for value, _ in ask(setup, tmp_path / "again", "loglikelihood", pairs)]
    lengths = [len(setup.plain(context + answer)) - len(setup.plain(context)) for context, answer in pairs]
    shifts = [round((e - v) / n) for e, v, n in zip(exact, values, lengths, strict=True)]
    assert shifts == [1, 1, 1, 2]


def test_equal_requests_of_two_shards_are_asked_by_one_of_them(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request may change a last bit of the same answer, and shards with two answers are not merged."""
    monkeypatch.setattr(endpoint_lm, "CHUNK_REQUESTS", 1)
    pairs = [("one", " yes"), ("two", " yes"), ("one", " yes"), ("three", " yes")]
    requests = [Instance("loglikelihood", {"cluster": f"c{i}"}, pair, i) for i, pair in enumerate(pairs)]
    entries: list[list[str]] = []

    async def run(shard: Shard) -> None:
        settings = HarnessEval(kind="harness", task="t")
        context = replace(setup.make_context(tmp_path / f"{shard.number}", settings), shard=shard)
        model = await asyncio.to_thread(EndpointLM, context, Bridge())
        await asyncio.to_thread(model.loglikelihood, requests)
        context.journal.close()
        entries.append([entry["key"] for entry in read_entries(tmp_path / f"{shard.number}" / "journal")])

    for number in range(1, 5):
        (tmp_path / f"{number}").mkdir()
        asyncio.run(run(Shard(number, 4)))
    clusters = [{i for i in range(4) if Shard(number, 4).holds(f"c{i}")} for number in range(1, 5)]
    assert not any({0, 2} <= own for own in clusters), "the equal ones are in two shards"
    keys = [key for own in entries for key in own]
    assert len(keys) == len(set(keys)) == 3


@pytest.mark.parametrize(("num_places", "most"), [(2, 3), (6, 9)])
def test_so_many_chunks_are_asked_at_once_as_keep_all_servers_busy(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_places: int, most: int
) -> None:
    monkeypatch.setattr(endpoint_lm, "CHUNK_REQUESTS", 2)
    monkeypatch.setattr(endpoint_lm, "CHUNKS_AHEAD", 3)
    make_context, score, sizes, running, all_there = setup.make_context, setup.client.score, [0], 0, asyncio.Event()

    async def count(batch: list[list[int]], *, top_logprobs: int) -> list[TokenScores]:
        nonlocal running
        running += 1
        sizes.append(running)
        if running == most:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 20)
        await asyncio.sleep(0.05)  # one too many would show itself
        running -= 1
        return await score(batch, top_logprobs=top_logprobs)

    monkeypatch.setattr(setup.client, "score", count)
    monkeypatch.setattr(setup, "make_context", lambda *args: replace(make_context(*args), places=Places(num_places)))
    ask(setup, tmp_path, "loglikelihood", [(f"a question {i}", " yes") for i in range(40)])
    assert max(sizes) == most


def test_lm_eval_s_rolling_requests_are_those_of_perplexity(setup: Setup, tmp_path: Path) -> None:
    values = ask(setup, tmp_path, "loglikelihood_rolling", [(text,) for text in DOCUMENTS])
    for value, text in zip(values, DOCUMENTS, strict=True):
        tokens = setup.plain(text.removeprefix(BOS)) + ([setup.end] if setup.adds in ("eos", "both") else [])
        assert abs(-value - sum_nll(setup.client.model, setup.bos, tokens)) < MAX_DIFFERENCE_NATS * len(tokens)


def test_lm_eval_s_own_model_counts_a_second_bos(setup: Setup) -> None:
    """What the docs say of it: by default it predicts BOS behind BOS, with `add_bos_token=False` it does not."""
    from lm_eval.models.huggingface import HFLM

    text = TEXTS[0]
    tail = [setup.end] if setup.adds in ("eos", "both") else []
    second = [setup.bos] if setup.adds in ("bos", "both") else []
    for option, tokens in ((None, second + setup.plain(text) + tail), (False, setup.plain(text))):
        model = HFLM(
            pretrained=setup.client.model,
            tokenizer=setup.client.tokenizer,
            add_bos_token=option,
            max_length=CONTEXT,
            device="cpu",
        )
        (value,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
        expected = sum_nll(setup.client.model, setup.bos, tokens)
        print(f"{setup.adds}, add_bos_token={option}: lm-eval {-value:.4f} nats, {len(tokens)} tokens")
        assert abs(-value - expected) < MAX_DIFFERENCE_NATS * len(tokens)


def test_a_tokenizer_that_rewrites_a_text_is_refused(setup: Setup) -> None:
    class Rewriting(InProcess):
        async def tokenize(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
            return [[7]] if add_special_tokens else [[8]]

    with pytest.raises(CheckpointError, match=r"special tokens round a text, got \[7\] for 'a' with them and \[8\]"):
        asyncio.run(read_frame(Rewriting(None, None), setup.folder))  # type: ignore[arg-type]  # needs no model


def test_a_chat_has_the_bos_of_its_template_alone(setup: Setup) -> None:
    """Of Llama's, template and tokenizer both have one; where messages are rendered, the template's counts."""
    tokenizer = setup.client.tokenizer
    template = tokenizer.chat_template
    tokenizer.chat_template = BOS + template
    try:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_dict=True)["input_ids"]
    finally:
        tokenizer.chat_template = template
    assert ids.count(setup.bos) == 1 and ids[0] == setup.bos
