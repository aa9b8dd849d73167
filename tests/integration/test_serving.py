"""The embedded engine end to end: it answers as plain transformers does, and nothing outlives its parent."""

from __future__ import annotations

import asyncio
import gzip
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers.decoders import DecodeStream

from pipeline.errors import EngineError, RequestError
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.evals.canary_prompts import Prompt
from pipeline.products.text.evals.trace import trace_engine
from pipeline.products.text.model_loading import load_model, load_tokenizer
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines import registry as engines
from pipeline.products.text.serving.engines import transformers
from pipeline.products.text.serving.engines.engine import Engine, check_facts
from pipeline.products.text.serving.engines.processes import ServerProcess
from pipeline.products.text.serving.scoring import score_sequences
from pipeline.products.text.settings import EvalSettings, PerplexityEval, ResourceSettings, ToolCallsEval
from pipeline.records.evaluations import Candidate
from pipeline.records.fingerprints import find_difference, fingerprint
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig, sum_speculation
from pipeline.running.tracing import TRACES, list_traces
from tests.fakes.processes import is_running, wait_for_end
from tests.fakes.tiny_llama import write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 256
LONG = 3_000_000 * "x"  # its tokens alone would take seconds, in which nobody else is served
SERVING = ServingConfig(concurrency=16, context_length=CONTEXT, max_tokens=32)
SETTINGS = ResourceSettings(num_servers=1, request_timeout_s=60, start_timeout_s=180)
EVALS: dict[str, EvalSettings] = {
    "prose": PerplexityEval(kind="perplexity", evalset="e"),
    "calls": ToolCallsEval(kind="tool_calls", evalset="e"),
}
WORDS = ["the", "courier", "takes", "12", "parcels", "to", "gate", "before", "noon", "result", "of", "apples"]


def make_candidate(folder: Path, **serving: Any) -> Candidate:
    checkpoint = read_checkpoint(folder, root=folder.parent)
    return Candidate(
        name="tiny",
        checkpoint=checkpoint,
        serving=SERVING.model_copy(update=serving),
        libraries={"safetensors": importlib.metadata.version("safetensors")},
    )


def make_texts(count: int) -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, generator.integers(2, 40))) for _ in range(count)]


@dataclass
class Running:
    """One engine for all tests of this file: starting it is what costs time."""

    runner: asyncio.Runner
    engine: engines.Engine
    client: Client
    folder: Path
    model: Any
    tokenizer: Any

    def chat(self, messages: list[dict[str, str]], **options: Any) -> Any:
        return self.runner.run(self.client.chat(messages, **{"max_tokens": 12, **options}))

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.engine.base_urls[0] + path, json=body, timeout=60)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("serving") / "tiny")
    torch.set_num_threads(1)
    model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
    with asyncio.Runner() as runner:
        root = folder.parent
        context = engines.start_engine(
            make_candidate(folder), SETTINGS, evals=EVALS, root=root, logs=root / "logs", traces=root / "a" / TRACES
        )
        engine, client = runner.run(context.__aenter__())
        try:
            yield Running(runner, engine, client, folder, model, tokenizer)
        finally:
            runner.run(context.__aexit__(None, None, None))
    assert all(process.popen.returncode is not None for process in engine.processes)


def plain_answer(running: Running, messages: list[dict[str, str]], max_tokens: int) -> str:
    inputs = running.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = running.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return running.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_plain_greedy_generation_also_in_a_batch(running: Running) -> None:
    conversations = [[{"role": "user", "content": text}] for text in make_texts(24)]

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(running.client.chat(m, max_tokens=12) for m in conversations))

    replies = running.runner.run(ask_all())
    assert [r.text for r in replies] == [plain_answer(running, m, 12) for m in conversations]
    assert {r.fingerprint for r in replies} == {running.engine.fingerprint}


def test_turns_that_reuse_a_cached_prefix_answer_the_same(running: Running) -> None:
    messages = [{"role": "user", "content": " ".join(WORDS * 2)}]
    for turn in range(3):
        reply = running.chat(messages, session="one")
        assert reply.text == plain_answer(running, messages, 12)
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": f"and {turn}?"}]


@pytest.mark.parametrize("chats", [True, False], ids=["chats", "scores"])
def test_a_trace_shows_forward_passes_of_its_own_requests(running: Running, chats: bool) -> None:
    evaluation = running.folder.parent / "a"
    prompts = [Prompt("calls/t0", "d", [{"role": "user", "content": "list"}], None)] if chats else []
    running.runner.run(trace_engine(running.engine, SETTINGS, prompts, evaluation=evaluation))
    (path,) = list_traces(evaluation)
    with gzip.open(path) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    num_forwards = names.count("aten::embedding")
    assert path.name == "server-0.json.gz" and (num_forwards > 1 if chats else num_forwards == 1)
    assert running.post("/stop_profile", {}).status_code == 409


def test_max_tokens_is_obeyed(running: Running) -> None:
    reply = running.chat([{"role": "user", "content": "list"}], max_tokens=3)
    assert reply.num_completion_tokens <= 3


def test_fingerprint_is_the_candidates_and_computed_by_the_server(running: Running) -> None:
    candidate = make_candidate(running.folder)
    answer = running.runner.run(running.client.get("/v1/fingerprint"))
    assert answer["fingerprint"] == fingerprint(answer["facts"]) == running.engine.fingerprint
    assert find_difference(candidate.facts, answer["facts"]) is None
    assert answer["facts"]["checkpoint"]["digest"] == candidate.checkpoint.digest
    assert answer["facts"]["sampling"]["do_sample"] is False
    assert answer["facts"]["engine"]["block_size"] == 16 and answer["facts"]["environment"] == {"OMP_NUM_THREADS": "1"}
    assert str(running.folder.parent) not in str(answer)  # no path: moving a folder changes nothing


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.7}, "temperature: expected 0, got 0.7"),
        ({"messages": []}, "expected at least one message"),
        ({"messages": ["x"]}, "messages: expected objects with a role, got 'x' as message 0"),
        ({"messages": [{"role": "user", "content": LONG}]}, "got a text of 3,000,000 characters"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
            "got a text of 3,000,000 chara",
        ),
        ({"max_tokens": CONTEXT}, f"expected at most {CONTEXT} tokens"),
        ({"max_tokens": CONTEXT, "stream": True}, f"expected at most {CONTEXT} tokens"),
        ({"max_tokens": CONTEXT, "stop": "x"}, f"expected at most {CONTEXT} tokens"),
        ({"ignore_eos": True}, "expected true and the number of max_tokens (4), or neither field, got "),
        ({"min_tokens": 3, "ignore_eos": True}, "or neither field, got {'ignore_eos': True, 'min_tokens': 3}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_ignored_or_frozen_is_refused(running: Running, change: dict[str, Any], words: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 4}
    response = running.post("/v1/chat/completions", {**body, **change})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def post_chat(running: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the courier takes"}], **fields}
    response = running.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_plainest_call_is_greedy_and_has_the_rest_of_the_context(running: Running) -> None:
    answer = post_chat(running)
    num_prompt, num_tokens = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    explicit = post_chat(running, temperature=0, max_tokens=CONTEXT - num_prompt)
    assert answer["choices"] == explicit["choices"]
    is_full = num_prompt + num_tokens == CONTEXT
    assert answer["choices"][0]["finish_reason"] == ("length" if is_full else "stop")


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_the_text_and_generation(running: Running, streams: bool) -> None:
    """Cutting the text alone would cost the tokens behind it."""
    limit = CONTEXT - 32
    whole = post_chat(running, max_tokens=limit, ignore_eos=True, min_tokens=limit)["choices"][0]["message"]["content"]
    stop = whole[20:24]
    fields: dict[str, Any] = {"max_tokens": limit, "ignore_eos": True, "min_tokens": limit, "stop": ["never", stop]}
    if not streams:
        answer = post_chat(running, **fields)
        text, finish = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        num_tokens = answer["usage"]["completion_tokens"]
    else:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the courier takes"}], **fields}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        lines = running.post("/v1/chat/completions", body | options).text.split("\n\n")
        *chunks, usage = (json.loads(line.removeprefix("data: ")) for line in lines if "{" in line)
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        finish, num_tokens = chunks[-1]["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]
    assert text == whole[: whole.index(stop)]
    assert finish == "stop" and num_tokens < limit


def test_logprobs_of_a_chat_are_those_of_its_tokens(running: Running) -> None:
    answer = post_chat(running, max_tokens=6, logprobs=True, top_logprobs=2, return_token_ids=True)
    (choice,) = answer["choices"]
    prompt, tokens = answer["prompt_token_ids"], choice["token_ids"]
    expected = plain_scores(running.model, prompt + tokens)[len(prompt) - 1 :]
    given = choice["logprobs"]["content"]
    np.testing.assert_allclose([entry["logprob"] for entry in given], expected[: len(given)], atol=2e-5)
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in given), "greedy"


def test_an_echo_with_one_more_token_has_the_entry_that_lm_eval_drops(running: Running) -> None:
    """It reads all but the last entry: without the generated token's it would lose the last one of the text."""
    ids = running.tokenizer("the courier takes 12 parcels")["input_ids"]
    body = {"model": "tiny", "prompt": [ids, ids[:4]], "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
    first, second = running.post("/v1/completions", body | {"seed": 1234}).json()["choices"]
    assert len(first["logprobs"]["token_logprobs"]) == len(ids) + 1 and len(second["logprobs"]["tokens"]) == 5
    np.testing.assert_allclose(first["logprobs"]["token_logprobs"][1:-1], plain_scores(running.model, ids), atol=2e-5)


def test_an_error_has_what_an_openai_client_reads(running: Running) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 2}
    error = running.post("/v1/chat/completions", body).json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "n", "unsupported_value")


def test_another_models_name_is_refused(running: Running) -> None:
    body = {"model": "other", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 4}
    assert running.post("/v1/chat/completions", body).status_code == 404


@pytest.mark.parametrize("prompt", [[[1, 100_000]], [[1]], [], "", 7, [list(range(CONTEXT + 2))]], ids=str)
def test_sequences_that_can_not_be_scored_are_refused(running: Running, prompt: Any) -> None:
    body = {"model": "tiny", "prompt": prompt, "echo": True, "max_tokens": 1, "logprobs": 1}
    assert running.post("/v1/completions", body | {"return_tokens_as_token_ids": True}).status_code == 400


def plain_scores(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def test_scores_are_those_of_plain_transformers_while_batching_is_on(running: Running) -> None:
    sequences = [running.tokenizer(text)["input_ids"] for text in make_texts(12)]
    running.chat([{"role": "user", "content": "x"}])  # continuous batching has switched its attention by now
    scores = running.runner.run(running.client.score(sequences, top_logprobs=3))
    for ids, score in zip(sequences, scores, strict=True):
        np.testing.assert_allclose(score.token_logprobs, plain_scores(running.model, ids), atol=2e-5)
        assert score.top_logprobs.shape == (len(ids) - 1, 3)
        assert (np.diff(score.top_logprobs) <= 0).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_shared_prefix_changes_no_score(running: Running, attention: str) -> None:
    generator = np.random.default_rng(1)
    prefix = generator.integers(7, 300, 40).tolist()
    sequences = [prefix + generator.integers(7, 300, n).tolist() for n in (1, 5, 9, 2)]
    sequences += [prefix, prefix, prefix[:30], generator.integers(7, 300, 50).tolist(), [3, 4]]
    running.model.set_attn_implementation(attention)
    fed: list[int] = []
    hook = running.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    scores = score_sequences(running.model, sequences, num_top=2)
    hook.remove()
    assert sum(fed) < 0.6 * sum(map(len, sequences))  # the 40 shared tokens were not fed seven times
    for ids, score in zip(sequences, scores, strict=True):
        np.testing.assert_allclose(score.token_logprobs, plain_scores(running.model, ids), atol=2e-5)


def test_tokens_are_those_of_the_checkpoints_tokenizer(running: Running) -> None:
    texts = make_texts(3)
    ids = running.runner.run(running.client.tokenize(texts))
    assert ids == [running.tokenizer.encode(text) for text in texts]


def test_the_serial_path_answers_the_probe_as_plain_generation_does(running: Running) -> None:
    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    loaded = load_candidate(make_candidate(running.folder, continuous_batching=False), running.folder)
    running.runner.run(Server(loaded).probe())


def speculative_candidate(folder: Path, draft: Path | None, num_tokens: int) -> Candidate:
    config = SpeculativeConfig(method="prompt_lookup", num_tokens=num_tokens)
    if draft is not None:
        digest, path = read_checkpoint(draft, root=draft.parent).digest, draft.name
        config = SpeculativeConfig(method="draft_model", num_tokens=num_tokens, draft_digest=digest, draft_path=path)
    return make_candidate(folder, continuous_batching=False, speculative=config)


@pytest.mark.parametrize(("draft_seed", "num_tokens"), [(0, 4), (1, 3), (None, 3)], ids=["twin", "stranger", "lookup"])
def test_speculation_gives_the_targets_own_answers_and_its_counts_add_up(
    running: Running, draft_seed: int | None, num_tokens: int
) -> None:
    """A twin of the target is always right, a stranger hardly ever: the answers are the same."""
    root = running.folder.parent
    draft = None if draft_seed is None else write_tiny_llama(root / f"draft-{draft_seed}", seed=draft_seed)
    candidate = speculative_candidate(running.folder, draft, num_tokens)
    conversations = [[{"role": "user", "content": text}] for text in make_texts(8)]

    async def ask_all() -> list[Any]:
        context = engines.start_engine(candidate, SETTINGS, evals=EVALS, root=root, logs=root / "logs")
        async with context as (engine, client):
            assert engine.facts["serving"]["speculative.num_tokens"] == num_tokens
            replies = await asyncio.gather(*(client.chat(m, max_tokens=12) for m in conversations))
            assert {r.fingerprint for r in replies} == {engine.fingerprint} != {running.engine.fingerprint}
            return replies

    replies = running.runner.run(ask_all())
    assert [r.text for r in replies] == [plain_answer(running, m, 12) for m in conversations]
    for reply in replies:
        counts = reply.speculation
        assert counts is not None
        assert counts.num_completion_tokens == reply.num_completion_tokens
        missing = counts.num_target_forwards + counts.num_accepted - counts.num_completion_tokens
        assert missing in (0, 1)  # an accepted token may end the answer
    total = sum_speculation(r.speculation for r in replies)
    assert total is not None and total.num_drafted > 0
    if draft_seed == 0:
        assert total.acceptance_rate == 1 and total.num_target_forwards < total.num_completion_tokens / 2


NUM_TOKENS = 24


def decode_as_a_stream(tokenizer: Any, tokens: list[int]) -> str:
    """What has been sent after the last token: one that ends within a character is held back."""
    stream = DecodeStream([], skip_special_tokens=True)
    return "".join(stream.step(tokenizer._tokenizer, token) or "" for token in tokens)


async def stream_answer(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """Stream an answer of exactly NUM_TOKENS tokens; return its text and the last chunk."""
    body = {
        "model": "tiny",
        "messages": messages,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "min_tokens": NUM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = await client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert last == "[DONE]"
    *chunks, usage = map(json.loads, lines)
    assert usage.pop("choices") == [] and not any("usage" in chunk for chunk in chunks)
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks), chunks[-1] | usage


@pytest.mark.parametrize(("path", "draft_seed"), [("batched", None), ("serial", None), ("lookup", None), ("draft", 0)])
def test_a_stream_decodes_exactly_as_many_tokens_as_asked(
    running: Running, tmp_path: Path, path: str, draft_seed: int | None
) -> None:
    """Half of the vocabulary ends an answer here, so that none would come near the number by itself."""
    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    folder = shutil.copytree(running.folder, tmp_path / "tiny")
    config = json.loads((folder / "generation_config.json").read_text())
    ends = list(range(0, len(running.tokenizer), 2))
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    draft = None if draft_seed is None else write_tiny_llama(tmp_path / "draft", seed=draft_seed)
    candidate = (
        make_candidate(folder, continuous_batching=path == "batched")
        if path in ("batched", "serial")
        else speculative_candidate(folder, draft, 3)
    )
    server = Server(load_candidate(candidate, folder, draft_folder=draft))
    conversations = [[{"role": "user", "content": text}] for text in make_texts(8)]

    async def ask_all() -> tuple[list[Any], list[Any]]:
        transport = httpx.ASGITransport(app=server.build_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=60) as client:
            plain = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS}
            answers = [
                (await client.post("/v1/chat/completions", json=plain | {"messages": m})).json() for m in conversations
            ]
            return answers, await asyncio.gather(*(stream_answer(client, m) for m in conversations))

    try:
        answers, streamed = running.runner.run(ask_all())
    finally:
        server._manager.stop()
    for messages, (text, last) in zip(conversations, streamed, strict=True):
        inputs = running.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        num_prompt = inputs["input_ids"].shape[1]
        plain = running.model.generate(**inputs, max_new_tokens=NUM_TOKENS, eos_token_id=-1, do_sample=False)[0]
        assert text == decode_as_a_stream(running.tokenizer, plain[num_prompt:].tolist())
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (num_prompt, NUM_TOKENS)
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["system_fingerprint"] == server.loaded.fingerprint
        assert ("speculation" in last["usage"]) == (path in ("lookup", "draft"))
        if draft is not None:  # the target's twin: what it drafts is always right
            counts = SpeculationCounts(**last["usage"]["speculation"])
            assert counts.acceptance_rate == 1 and counts.num_target_forwards == NUM_TOKENS / 4
    assert min(answer["usage"]["completion_tokens"] for answer in answers) < NUM_TOKENS


def test_messages_are_tokenised_as_a_chat_renders_them(running: Running) -> None:
    messages = [{"role": "user", "content": "the courier"}]
    ids = running.runner.run(running.client.tokenize_chat(messages))
    assert ids == running.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert len(ids) == running.chat(messages).num_prompt_tokens


def test_another_draft_than_the_candidates_is_named(running: Running, tmp_path: Path) -> None:
    draft = write_tiny_llama(tmp_path / "draft", seed=2)
    candidate = speculative_candidate(running.folder, draft, 2)
    write_tiny_llama(draft, seed=3)

    async def start() -> None:
        async with engines.start_engine(candidate, SETTINGS, evals=EVALS, root=tmp_path, logs=tmp_path / "logs"):
            raise AssertionError("must not come up")

    (tmp_path / "tiny").symlink_to(running.folder)
    with pytest.raises(EngineError, match="serving.speculative.draft_digest: the candidate says"):
        running.runner.run(start())


def test_speculation_under_continuous_batching_is_refused(running: Running) -> None:
    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    candidate = speculative_candidate(running.folder, None, 2)
    serving = candidate.serving.model_copy(update={"continuous_batching": True})
    loaded = load_candidate(candidate.model_copy(update={"serving": serving}), running.folder)
    with pytest.raises(EngineError, match="continuous batching drops speculation"):
        Server(loaded)


def test_a_server_that_drafts_nothing_does_not_come_up(running: Running) -> None:
    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    loaded = load_candidate(speculative_candidate(running.folder, None, 2), running.folder)
    loaded.model.generation_config.prompt_lookup_num_tokens = None
    with pytest.raises(EngineError, match="asked for speculation by prompt_lookup, drafted no token"):
        running.runner.run(Server(loaded).probe())


ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
)


def with_template(folder: Path, template: str | None) -> Path:
    write_tiny_llama(folder)
    file = folder / "chat_template.jinja"
    assert file.is_file()
    if template is None:
        file.unlink()
    else:
        file.write_text(template, encoding="utf-8")
    return folder


def test_messages_that_the_template_refuses_are_a_400_with_its_words(tmp_path: Path, running: Running) -> None:
    candidate = make_candidate(with_template(tmp_path / "tiny", ALTERNATING))
    user = {"role": "user", "content": "x"}
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}

    async def ask(messages: list[dict[str, Any]]) -> str:
        with pytest.raises(RequestError) as caught:
            await client.chat(messages, max_tokens=2)
        return str(caught.value)

    context = engines.start_engine(candidate, SETTINGS, evals=EVALS, root=tmp_path, logs=tmp_path / "logs")
    _, client = running.runner.run(context.__aenter__())
    try:
        assert running.runner.run(client.chat([user], max_tokens=2)).num_completion_tokens
        refused = running.runner.run(ask([user, user]))
        assert refused.endswith("HTTP 400: messages: the checkpoint's chat template fails: roles must alternate")
        assert "HTTP 400: messages: " in running.runner.run(ask([user, broken]))
        assert running.runner.run(ask([{"content": "x"}])).endswith("with a role, got {'content': 'x'} as message 0")
    finally:
        running.runner.run(context.__aexit__(None, None, None))


BAD_TEMPLATES = {
    "refuses": ("{{ raise_exception('not a chat model') }}", "not a chat model"),
    "syntax": ("{% for m in messages %}", "Unexpected end of template"),
    "raises": ("{{ messages + 1 }}", "can only concatenate list"),
}


@pytest.mark.parametrize(("template", "words"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES.keys())
def test_a_template_that_renders_no_chat_stops_the_start(
    tmp_path: Path, running: Running, template: str, words: str
) -> None:
    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    folder = with_template(tmp_path / "tiny", template)
    server = Server(load_candidate(make_candidate(folder, continuous_batching=False), folder))
    with pytest.raises(EngineError) as caught:
        running.runner.run(server.probe())
    said = f"{folder}/chat_template.jinja: the checkpoint's chat template fails: {words}"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_template_serves_evals_that_do_not_chat(tmp_path: Path, running: Running) -> None:
    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    folder = with_template(tmp_path / "tiny", None)
    serial = make_candidate(folder, continuous_batching=False)
    running.runner.run(Server(load_candidate(serial, folder)).probe())

    async def start() -> None:
        async with engines.start_engine(serial, SETTINGS, evals=EVALS, root=tmp_path, logs=tmp_path / "logs"):
            raise AssertionError("must not come up")

    with pytest.raises(
        EngineError,
        match="evals.calls: tool_calls needs chat answers .*HTTP 400: messages: the "
        "checkpoint has no chat template; add chat_template.jinja",
    ):
        running.runner.run(start())


def test_a_context_that_the_model_does_not_have_is_refused(running: Running) -> None:
    from pipeline.products.text.serving.loading import load_candidate

    with pytest.raises(EngineError, match="serving.context_length: expected at most 1024, .*got 1025; lower it"):
        load_candidate(make_candidate(running.folder, context_length=1025), running.folder)


def test_a_cache_that_memory_can_not_hold_names_the_settings(tmp_path: Path, running: Running) -> None:
    settings = SETTINGS.model_copy(update={"kv_cache_gib": 1e-5})

    async def start() -> None:
        async with engines.start_engine(
            make_candidate(running.folder), settings, evals=EVALS, root=running.folder.parent, logs=tmp_path / "logs"
        ):
            raise AssertionError("must not come up")

    with pytest.raises(EngineError, match=r"one context of 256 tokens, .* lower serving.context_length, "):
        running.runner.run(start())


def test_a_checkpoint_that_changes_greedy_answers_is_refused(tmp_path: Path, running: Running) -> None:
    from transformers import GenerationConfig

    from pipeline.products.text.serving.loading import greedy_config

    source = running.model.generation_config
    try:
        running.model.generation_config = GenerationConfig(repetition_penalty=1.2)
        with pytest.raises(EngineError, match="RepetitionPenalty"):
            greedy_config(running.model, running.tokenizer)
        running.model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9)
        assert greedy_config(running.model, running.tokenizer).do_sample is False
    finally:
        running.model.generation_config = source


def test_another_checkpoint_than_the_candidates_is_named(running: Running) -> None:
    candidate = make_candidate(running.folder)
    files = candidate.checkpoint.files | {"generation_config.json": "0" * 64}
    other = candidate.checkpoint.model_copy(update={"digest": "0" * 64, "files": files})
    stale = candidate.model_copy(update={"checkpoint": other})
    with pytest.raises(EngineError, match=r"s: checkpoint digest \(generation_config.json .*\): .* says '0000"):
        check_facts(stale, running.engine.facts, where="s")


def test_an_attached_server_of_ours_tells_what_it_is(running: Running) -> None:
    attached = {"engine": "openai", "base_url": running.engine.base_urls[0] + "/v1", "model": "tiny"}
    candidate = make_candidate(running.folder, **attached)

    async def attach(model: str) -> Engine:
        asked = candidate.model_copy(update={"serving": candidate.serving.model_copy(update={"model": model})})
        async with engines.start_engine(asked, SETTINGS, evals=EVALS, root=ROOT, logs=ROOT) as (engine, _):
            return engine

    engine = running.runner.run(attach("tiny"))
    assert engine.processes == () and engine.facts["checkpoint"] == running.engine.facts["checkpoint"]
    assert engine.facts["engine"]["serving.continuous_batching"] is True, "how it is really served"
    with pytest.raises(EngineError, match="expected 'other' among the served models, got \\['tiny'\\]"):
        running.runner.run(attach("other"))


def test_a_server_that_does_not_start_is_one_line_with_its_log(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    candidate = make_candidate(folder)
    (folder / "model.safetensors").write_bytes(b"broken")

    async def start() -> None:
        async with engines.start_engine(candidate, SETTINGS, evals=EVALS, root=tmp_path, logs=tmp_path / "logs"):
            raise AssertionError("must not come up")

    with pytest.raises(EngineError, match=r"server server-0: exited with code 1: .*model\.safetensors") as caught:
        asyncio.run(start())
    assert "\n" not in str(caught.value) and "server-0.log" in str(caught.value)


def test_of_two_servers_that_fail_the_first_failure_is_told_and_nothing_else(
    tmp_path: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio prints a traceback for the failure of a task that nobody waited for."""
    unhandled: list[dict[str, Any]] = []

    def spawn(candidate: Candidate, *, root: Path, log: Path, **_: Any) -> ServerProcess:
        log.parent.mkdir(exist_ok=True)
        code = "import sys, time; time.sleep(float(sys.argv[1])); sys.exit('broken')"
        seconds = {"server-0": "60", "server-1": "0", "server-2": "0"}[log.stem]
        with log.open("wb") as log_file:
            popen = subprocess.Popen(
                [sys.executable, "-c", code, seconds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file
            )
        return ServerProcess(popen, log)

    async def start() -> None:
        settings = SETTINGS.model_copy(update={"num_servers": 3})
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        async with engines.start_engine(
            make_candidate(running.folder), settings, evals=EVALS, root=tmp_path, logs=tmp_path / "logs"
        ):
            raise AssertionError("must not come up")

    monkeypatch.setattr(transformers, "_spawn", spawn)
    with pytest.raises(EngineError, match=r"^server server-[12]: exited with code 1: broken \(log: "):
        asyncio.run(start())
    assert unhandled == []


ORPHAN = """
import signal, sys, time
from pathlib import Path
from pipeline.records.evaluations import Candidate
from pipeline.products.text.serving.engines import transformers
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
candidate = Candidate.model_validate_json(sys.argv[1])
process = transformers._spawn(candidate, root=Path(sys.argv[2]), log=Path(sys.argv[2]) / "server-0.log")
print(process.popen.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
def test_no_server_outlives_its_parent(running: Running, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, make_candidate(running.folder).model_dump_json(), str(running.folder.parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.send_signal(number)
    parent.wait(timeout=120)
    wait_for_end(server)
    assert not is_running(server)


def test_a_server_that_dies_is_noticed_at_once(running: Running) -> None:
    """Last in the file: the engine is gone afterwards."""
    os.kill(running.engine.processes[0].popen.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"killed by signal 9: .*server-0\.log"):
        running.chat([{"role": "user", "content": "x"}])
    assert time.monotonic() - start < 5


FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 312.00 MiB is "
    "free. Including non-PyTorch memory, this process has 38.80 GiB memory in use."
)
FULL_SAID = r"out of memory on GPU 0: 2\.00 GiB needed, 312\.00 MiB of 79\.11 GiB free, 40\.01 GiB held by other "
LOWER = r"; lower serving\.context_length \(256\) or serving\.concurrency \(16\), which the cache is sized by \(log: "
DEAD = "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in the documentation."
DEAD_SAID = r"the GPU or its driver failed: CUDA error: unspecified launch failure; see nvidia-smi, and dmesg for Xid"


@pytest.mark.parametrize(
    ("where", "text", "said"),
    [
        ("load", FULL, rf"loading \S+/tiny: {FULL_SAID}.*; serve weights of fewer bits, or "),
        ("load", "a mistake of ours", "RuntimeError: a mistake of ours"),
        ("chat", FULL, rf"answering chats: {FULL_SAID}.*{LOWER}"),
        ("chat", DEAD, f"answering chats: {DEAD_SAID}"),
        ("chat", "a mistake of ours", "answering chats: the generation thread ended: a mistake of ours"),
        ("score", FULL, rf"scoring texts: {FULL_SAID}.*{LOWER}"),
        ("score", DEAD, f"scoring texts: {DEAD_SAID}"),
    ],
)
def test_a_gpu_that_fails_ends_its_server_and_the_run_with_one_line(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, text: str, said: str
) -> None:
    """A server that lived on would answer nonsense, or fail each request five times over."""
    monkeypatch.setattr(transformers, "launcher", SimpleNamespace(__name__="tests.fakes.failing_launcher"))
    monkeypatch.setenv("FAILS_AT", where)
    monkeypatch.setenv("FAILS_WITH", text)
    starting = engines.start_engine(
        make_candidate(running.folder), SETTINGS, evals=EVALS, root=running.folder.parent, logs=tmp_path
    )

    async def ask() -> None:
        async with starting as (_, client):
            if where == "score":
                await client.score([[3, 4, 5, 6]] * 8, top_logprobs=1)
            for _ in range(10):
                await asyncio.gather(*(client.chat([{"role": "user", "content": "x"}], max_tokens=8) for _ in "abcd"))

    with pytest.raises(EngineError, match=rf"^server server-0: exited with code 1: tiny: {said}") as caught:
        running.runner.run(ask())
    assert "\n" not in str(caught.value)
