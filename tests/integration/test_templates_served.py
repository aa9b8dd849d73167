"""Models of a type whose answers the library parses, with a template that its parser is not for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.serving.app import Server
from pipeline.products.text.serving.chat_template import choose_parsed_type
from pipeline.products.text.serving.loading import load_candidate
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
CALLING = {"fields": {"tool_calls": CALLS, "content": {"close": "<|end|>", "content": "text"}}}
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


@pytest.mark.parametrize(
    "written",
    ['<tool_call>{"name": "a"}}</tool_call>', '<tool_call>{"name": "a", "argu', "<tool_call>[1]</tool_call>"],
    ids=["no-json", "cut", "no-call"],
)
def test_a_call_that_the_parser_cannot_read_is_text(
    server: Server, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """It was HTTP 500, so that an evaluation ended where a model wrote a wrong answer."""
    tokenizer = server.loaded.tokenizer
    tokens = tokenizer.encode(written, add_special_tokens=False)

    async def generate(model: Any, processor: Any, inputs: Any, config: Any, **fields: Any) -> tuple[str, int, Any]:
        return written, len(inputs["input_ids"]), tokens

    monkeypatch.setattr(tokenizer, "response_template", CALLING, raising=False)
    monkeypatch.setattr(server._generation, "parsed_type", server.loaded.model)
    monkeypatch.setattr(server._manager, "generate_non_streaming", generate)
    reply = post(server, max_tokens=200, return_token_ids=True)
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"] == {"role": "assistant", "content": written}
    assert choice["token_ids"] == tokens and reply.json()["usage"]["completion_tokens"] == len(tokens)


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
