"""Models of a type whose answers the library parses, with a template that its parser is not for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.serving.app import Server
from pipeline.products.text.serving.chat_template import choose_parsed_type
from pipeline.products.text.serving.loading import load_candidate
from pipeline.products.text.serving.streams import PieceStreamer
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from tests.fakes.tiny_architectures import write_tiny_model
from tests.fakes.tiny_llama import build_tokenizer

ASKED = [{"role": "user", "content": "Where is the parcel?"}]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
WHOLE, BOTH = ("<|im_end|>", None, True), (["<|im_end|>", "<|end|>"], None, True)
CALLS = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
CALLING = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": CALLS | {"transform": {"type": "function", "function": "{content}"}},
        "content": {"close": "<|end|>", "content": "text"},
    },
}
WAYS = pytest.mark.parametrize("way", [{}, {"stop": ["%"]}, {"stream": True}], ids=["plain", "stop", "stream"])
ANCHORED = {"start_anchor": "<|assistant|>", "fields": {"content": {"close": "<|end|>", "content": "text"}}}


@pytest.fixture(scope="module", params=["batched", "serial"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")
    batched = request.param == "batched"
    serving = ServingConfig(concurrency=2, context_length=256, max_tokens=16, continuous_batching=batched)
    checkpoint = read_checkpoint(folder, root=folder.parent)
    server = Server(load_candidate(Candidate(name="tiny", checkpoint=checkpoint, serving=serving), folder))
    yield server
    server._manager.stop()


def post(server: Server, **fields: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=server.build_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=60) as client:
            body = {"model": "tiny", "messages": ASKED, "max_tokens": 8, **fields}
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(ask())


def write_answer(server: Server, monkeypatch: pytest.MonkeyPatch, written: str) -> list[int]:
    """Have a server of a model whose answers are parsed write an answer; return its tokens."""
    tokenizer = server.loaded.tokenizer
    tokens = tokenizer.encode(written, add_special_tokens=False)

    async def generate(model: Any, processor: Any, inputs: Any, config: Any, **fields: Any) -> tuple[str, int, Any]:
        return tokenizer.decode(tokens, skip_special_tokens=True), len(inputs["input_ids"]), tokens

    def stream(
        model: Any, processor: Any, inputs: Any, config: Any, request_id: str, response_parser: Any
    ) -> tuple[Any, Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        streamer = PieceStreamer(tokenizer._tokenizer, loop, queue, response_parser=response_parser)
        for some in ([], *([token] for token in tokens)):  # the prompt first
            streamer.put(torch.tensor(some, dtype=torch.int64))
        streamer.finish()
        return queue, streamer

    monkeypatch.setattr(tokenizer, "response_template", CALLING, raising=False)
    monkeypatch.setattr(server._generation, "parsed_type", server.loaded.model)
    monkeypatch.setattr(server._manager, "generate_non_streaming", generate)
    monkeypatch.setattr(server._manager, "generate_streaming", stream)
    return tokens


def read_answer(reply: httpx.Response) -> tuple[dict[str, Any], str, int | None]:
    """Return an answer's message, streamed or not, why it ended, and its tokens where they are stated."""
    if reply.headers["content-type"] == "application/json":
        (choice,) = reply.json()["choices"]
        return choice["message"], choice["finish_reason"], reply.json()["usage"]["completion_tokens"]
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    message: dict[str, Any] = {}
    for key, value in ((key, value) for choice in choices for key, value in choice["delta"].items()):
        message[key] = message[key] + value if key in message else value
    return message, choices[-1]["finish_reason"], None


def test_an_answer_is_what_was_generated_and_nothing_of_the_prompt(server: Server) -> None:
    """The library goes by the type of the model: of a Qwen with another template the prompt was in each answer."""
    (choice,) = post(server, return_token_ids=True).json()["choices"]
    expected = server.loaded.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert expected and choice["message"] == {"role": "assistant", "content": expected}
    stopped = post(server, stop=[expected[-1]]).json()["choices"][0]["message"]["content"]
    assert stopped == expected.partition(expected[-1])[0]
    lines = [line.removeprefix("data: ") for line in post(server, stream=True).text.splitlines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected


@WAYS
@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>{"name": "a"}}</tool_call>',
        '<tool_call>{"name": "a", "argu',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        'First:<tool_call>{"name"}</tool_call>. Then more.',
    ],
    ids=["no-json", "cut", "no-call", "no-name", "half-a-pair", "between-text"],
)
def test_a_call_that_the_parser_cannot_read_is_text(
    server: Server, monkeypatch: pytest.MonkeyPatch, written: str, way: dict[str, Any]
) -> None:
    """It was HTTP 500, so that an evaluation ended where a model wrote a wrong answer."""
    tokens = write_answer(server, monkeypatch, f"<think>Hm</think>{written}<|end|>")
    message, reason, _ = read_answer(post(server, max_tokens=len(tokens) + 1, **way))
    assert reason == "stop" and message == {"role": "assistant", "reasoning_content": "Hm", "content": written}


@WAYS
def test_text_on_both_sides_of_a_call_stays(
    server: Server, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    """Text behind a call took the place of the text before it, but for streams."""
    tokens = write_answer(server, monkeypatch, 'Hi <tool_call>{"name": "a", "arguments": {}}</tool_call>there<|end|>')
    message, reason, num_tokens = read_answer(post(server, max_tokens=200, **way))
    (call,) = message["tool_calls"]
    assert reason == "tool_calls" and call["function"] == {"name": "a", "arguments": "{}"}
    assert message["content"] == "Hi there" and num_tokens in (None, len(tokens))


@pytest.mark.parametrize(
    ("template", "end", "own", "is_parsed"),
    [
        (CHATML, "<|im_end|>", None, True),
        (THINKING, "<|im_end|>", None, True),
        (THINKING.replace("<|im_end|>", "<|end|>"), "<|end|>", None, False),
        ("{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + CHATML, *WHOLE),
        ("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}" + CHATML, *WHOLE),
        (CHATML.replace("<|im_end|>", "{{ '<|im_end|>' if not loop.last or message.role == 'user' }}"), *BOTH),
        (CHATML, "<|end|>", None, False),
        (CHATML, ["<|im_end|>", "<|end|>"], None, True),
        (CHATML.replace("<|im_end|>", "<|end|>"), ["<|im_end|>", "<|end|>"], None, False),
        (CHATML.replace("<|im_start|>", "<|user|>"), "<|im_end|>", None, False),
        (None, "<|end|>", ANCHORED, True),
        (None, "<|end|>", ANCHORED | {"start_anchor": "<|bot|>"}, False),
        (None, "<|end|>", ANCHORED | {"fields": {"content": {"open": "<|bot|>", "content": "text"}}}, False),
        (None, "<|end|>", {"fields": {}}, False),
        (None, "<|end|>", {"fields": ["content"]}, False),
        (None, "<|end|>", {"fields": {"thinking": "<think>"}}, False),
    ],
    ids=[
        "whole",
        "thinks",
        "thinks-with-another-end",
        "refuses-an-answer-at-the-end",
        "refuses-an-answer",
        "no-end-behind-the-last",
        "other-end",
        "one-end-that-is-never-written",
        "the-other-end-is-written",
        "other-opening",
        "own",
        "own-other-opening",
        "own-finds-nothing",
        "own-broken",
        "own-fields-are-no-mapping",
        "own-field-is-no-mapping",
    ],
)
def test_a_parser_is_used_where_it_finds_the_answer(
    template: str | None, end: str | list[str], own: dict[str, Any] | None, is_parsed: bool
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template or tokenizer.chat_template
    if own is not None:
        tokenizer.response_template = own
    ends = tokenizer.convert_tokens_to_ids(end)
    model = SimpleNamespace(
        config=SimpleNamespace(model_type="qwen2"), generation_config=SimpleNamespace(eos_token_id=ends)
    )
    assert (choose_parsed_type(tokenizer, model) is model) == is_parsed
