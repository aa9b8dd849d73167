"""Plain prompts through the embedded server: it continues them as plain transformers does, up to the first stop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from pipeline.products.text.model_loading import load_model, load_tokenizer
from pipeline.products.text.serving.answers import Reply, read_completion
from pipeline.products.text.serving.generation import StopStrings
from pipeline.records.evaluations import Candidate
from tests.fakes.tiny_llama import build_tokenizer, write_tiny_llama
from tests.integration.test_serving import decode_as_a_stream, make_candidate, make_texts, speculative_candidate

MAX_TOKENS = 16
BODY = {"model": "tiny", "temperature": 0, "max_tokens": MAX_TOKENS}
PATHS = ["batched", "serial", "lookup", "draft"]


def write_base_model(folder: Path) -> Path:
    """Write a model without a chat template."""
    write_tiny_llama(folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def make_server(folder: Path, path: str) -> Any:
    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    candidate: Candidate
    draft = folder.parent / "draft" if path == "draft" else None
    if path in ("batched", "serial"):
        candidate = make_candidate(folder, continuous_batching=path == "batched")
    else:
        candidate = speculative_candidate(folder, draft, 3)
    return Server(load_candidate(candidate, folder, draft_folder=draft))


async def post(server: Any, *bodies: dict[str, Any], to: str = "/v1/completions") -> list[httpx.Response]:
    """Send requests at once."""
    transport = httpx.ASGITransport(app=server.build_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=60) as client:
        return await asyncio.gather(*(client.post(to, json=BODY | body) for body in bodies))


def continue_plainly(folder: Path, prompts: list[str], **options: Any) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each prompt, and what plain transformers puts behind them."""
    model, tokenizer, pairs = load_model(folder, dtype="float32"), load_tokenizer(folder), []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, **options
        )
        pairs.append((ids[0].tolist(), output[0, ids.shape[1] :].tolist()))
    return pairs


@pytest.mark.parametrize("path", PATHS)
def test_a_plain_prompt_is_continued_as_by_plain_generation_up_to_its_first_stop(tmp_path: Path, path: str) -> None:
    folder, prompts = write_base_model(tmp_path / "tiny"), make_texts(12)
    write_tiny_llama(tmp_path / "draft")  # the target's twin
    tokenizer, pairs = load_tokenizer(folder), continue_plainly(folder, prompts)
    whole = [tokenizer.decode(answer, skip_special_tokens=True) for _, answer in pairs]
    stops = [tokenizer.decode(answer[4:6]) for _, answer in pairs]
    server = make_server(folder, path)

    async def ask() -> list[Reply]:
        bodies = [
            {"prompt": p, "return_token_ids": True} | ({"stop": ["\0no", s]} if s else {})
            for p, s in zip(prompts * 2, [*stops, *[""] * len(stops)], strict=True)
        ]
        return [read_completion(answer.json(), 0.1) for answer in await post(server, *bodies)]

    try:
        replies = asyncio.run(ask())
    finally:
        server._manager.stop()
    stopped, full = replies[: len(prompts)], replies[len(prompts) :]
    assert [r.text for r in full] == whole
    assert [r.text for r in stopped] == [text.split(stop)[0] for text, stop in zip(whole, stops, strict=True)]
    ended = [answer[-1] == tokenizer.eos_token_id for _, answer in pairs]
    assert [r.finish_reason for r in full] == ["stop" if has_ended else "length" for has_ended in ended]
    assert {r.finish_reason for r in stopped} == {"stop"} and not all(ended)
    assert [r.num_completion_tokens for r in full] == [len(answer) for _, answer in pairs]
    assert max(r.num_completion_tokens for r in stopped) < MAX_TOKENS, "nothing was saved"
    for reply, (prompt, answer) in zip(full, pairs, strict=True):
        assert (reply.prompt_token_ids, reply.token_ids) == (tuple(prompt), tuple(answer))
    for reply in replies:
        assert reply.fingerprint == server.loaded.fingerprint
        assert (reply.speculation is not None) == (path in ("lookup", "draft"))
        if reply.speculation is not None:
            assert reply.speculation.num_completion_tokens == reply.num_completion_tokens
    if path == "draft":
        assert all(r.speculation and r.speculation.acceptance_rate == 1 for r in full)


def make_stops(folder: Path, prompts: list[str]) -> list[str]:
    """Return for each prompt a text that its answer's fifth and sixth token make, and more tokens follow."""
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(answer[4:6]) for _, answer in continue_plainly(folder, prompts, eos_token_id=-1)]


@pytest.mark.parametrize("path", PATHS)
def test_drafts_add_no_token_behind_a_stop_string(tmp_path: Path, path: str) -> None:
    """A pass accepts several tokens at once: with the text alone cut, the gate saw other answers than the reference's.

    The twin's every draft is accepted, also one up to a stop string.
    """
    folder, prompts = write_base_model(tmp_path / "tiny"), make_texts(12)
    write_tiny_llama(tmp_path / "draft")
    exact = {"ignore_eos": True, "min_tokens": MAX_TOKENS, "return_token_ids": True}
    bodies = [{"prompt": p, "stop": s} | exact for p, s in zip(prompts, make_stops(folder, prompts), strict=True)]

    def ask(path: str) -> list[Reply]:
        server = make_server(folder, path)
        try:
            return [read_completion(answer.json(), 0.1) for answer in asyncio.run(post(server, *bodies))]
        finally:
            server._manager.stop()

    expected, replies = ask("serial"), ask(path)
    for plain, reply in zip(expected, replies, strict=True):
        assert (reply.text, reply.token_ids) == (plain.text, plain.token_ids)
        assert reply.num_completion_tokens == plain.num_completion_tokens == len(plain.token_ids or ()) <= 6
        assert reply.finish_reason == plain.finish_reason == "stop"
        if reply.speculation is not None:
            assert reply.speculation.num_completion_tokens == plain.num_completion_tokens
            assert path != "draft" or reply.speculation.acceptance_rate == 1


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
def test_a_chats_tokens_end_with_the_one_that_completes_a_stop_string(tmp_path: Path, path: str, streams: bool) -> None:
    """Generation runs ahead of the one who reads, with drafts and without."""
    folder = write_tiny_llama(tmp_path / "tiny")
    write_tiny_llama(tmp_path / "draft")
    tokenizer = load_tokenizer(folder)
    conversations = [[{"role": "user", "content": text}] for text in make_texts(24)]
    rendered = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    answers = [answer for _, answer in continue_plainly(folder, rendered, eos_token_id=-1)]
    told = [[decode_as_a_stream(tokenizer, answer[:n]) for n in range(MAX_TOKENS + 1)] for answer in answers]
    # after bytes that are no character a stream has no more text
    asked = [(c, texts, texts[10][-2:]) for c, texts in zip(conversations, told, strict=True) if texts[10] > texts[4]]
    assert len(asked) >= 8
    server = make_server(folder, path)

    async def ask() -> list[tuple[str, str, int]]:
        exact = {"ignore_eos": True, "min_tokens": MAX_TOKENS}
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
        bodies = [{"messages": messages, "stop": stop} | exact | options for messages, _, stop in asked]
        return [read_chat_answer(r) for r in await post(server, *bodies, to="/v1/chat/completions")]

    try:
        said = asyncio.run(ask())
    finally:
        server._manager.stop()
    for (text, finish, num_tokens), (_, texts, stop) in zip(said, asked, strict=True):
        needed = next(n for n, text in enumerate(texts) if stop in text)
        assert (text, finish, num_tokens) == (texts[-1].split(stop)[0], "stop", needed)


def read_chat_answer(response: httpx.Response) -> tuple[str, str, int]:
    """Return text, finish reason and number of tokens of a chat, streamed or not."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer = response.json()
        (choice,) = answer["choices"]
        return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]
    *chunks, usage = (json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n") if "{" in e)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    return text, chunks[-1]["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]


def test_a_stop_string_is_looked_for_in_the_answer_alone() -> None:
    tokenizer = build_tokenizer()
    ids = torch.tensor([tokenizer("The courier\n")["input_ids"] + tokenizer("\nA list")["input_ids"]])
    num_prompt = len(tokenizer("The courier\n")["input_ids"])
    for stop, is_held in [("\n\n", False), ("courier", False), ("\nA", True), ("<|end|>", False)]:
        assert StopStrings(tokenizer, [stop], num_prompt=num_prompt)(ids, None).tolist() == [is_held], stop
    assert StopStrings(tokenizer, ["<|end|>"], num_prompt=0).hold([tokenizer.eos_token_id])


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_of_a_plain_prompt_decodes_exactly_as_many_tokens_as_asked(tmp_path: Path, path: str) -> None:
    folder, (prompt,) = write_base_model(tmp_path / "tiny"), make_texts(1)
    write_tiny_llama(tmp_path / "draft")
    ((ids, answer),) = continue_plainly(folder, [prompt], eos_token_id=-1)
    server = make_server(folder, path)
    exact = {"ignore_eos": True, "min_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    try:
        (response,) = asyncio.run(post(server, {"prompt": prompt} | exact))
    finally:
        server._manager.stop()
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    *chunks, last = map(json.loads, lines[:-1])
    text, usage = "".join(c["choices"][0]["text"] for c in chunks), last["usage"]
    assert last["choices"] == []
    assert text == decode_as_a_stream(load_tokenizer(folder), answer)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), MAX_TOKENS)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert ("speculation" in usage) == (path in ("lookup", "draft"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.5}, "temperature: expected 0, got 0.5"),
        ({"logprobs": 1, "stop": "x"}, "logprobs: expected no stop beside it"),
        ({"prompt": 7}, "prompt: expected a text, token ids, or a list of either, got 7"),
        ({"prompt": ["x", "y"], "stream": True}, "prompt: expected one with stream, got 2"),
        ({"stop": [""]}, "stop: expected a text or a list of texts, none of them empty, got ['']"),
        ({"stop": ["x"], "stream": True}, "stop: expected no stream beside it"),
        ({"logprobs": 1, "stream": True}, "logprobs: expected no stream beside it"),
        ({"max_tokens": 256}, "prompt: expected at most 256 tokens with those to generate, got 257"),
        (
            {"prompt": ["x", 3_000_000 * "x"]},
            "prompt.1: expected at most 256 tokens, got a text of 3,000,000 characters",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_plain_prompt_that_would_be_answered_otherwise_is_refused(
    base_server: Any, change: dict[str, Any], words: str
) -> None:
    (response,) = asyncio.run(post(base_server, {"prompt": "x"} | change))
    assert response.status_code == 400 and words in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def base_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_server(write_base_model(tmp_path_factory.mktemp("base") / "tiny"), "serial")
