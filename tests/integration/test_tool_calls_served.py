"""Tool calls over OpenAI's API: the shipped agent calls, is answered, and goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.serving.app import Server
from pipeline.products.text.serving.loading import load_candidate
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig

ROOT = Path(__file__).resolve().parents[2]
ASKED = {"role": "user", "content": "Please open account H89."}
TEXT = '{"name":"account","arguments":{"id":"H89"}}'
TOOLS = [{"type": "function", "function": {"name": "account", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module", params=["batched", "serial"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    folder = ROOT / "models/agent"
    batched = request.param == "batched"
    serving = ServingConfig(concurrency=4, context_length=256, max_tokens=32, continuous_batching=batched)
    checkpoint = read_checkpoint(folder, root=ROOT)
    server = Server(load_candidate(Candidate(name="agent", checkpoint=checkpoint, serving=serving), folder))
    yield server
    server._manager.stop()


def post(server: Server, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=server.build_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", timeout=60) as client:
            body = {"model": "agent", "messages": list(messages), **fields}
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(ask())


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no-tools", "none"])
def test_without_tools_a_call_stays_the_text_that_the_evals_read(server: Server, fields: dict[str, Any]) -> None:
    (choice,) = post(server, ASKED, **fields).json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"] == {"role": "assistant", "content": TEXT}


def test_with_tools_a_call_is_a_tool_call_and_the_next_turn_sees_it(server: Server) -> None:
    """A turn that the template renders as nothing would be answered otherwise than in the evals."""
    (choice,) = post(server, ASKED, tools=TOOLS).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["type"] == "function" and call["function"] == {"name": "account", "arguments": '{"id":"H89"}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"avoid":"north"}'}
    after_call = post(server, ASKED, choice["message"], result).json()
    after_text = post(server, ASKED, {"role": "assistant", "content": TEXT}, result).json()
    assert after_call["choices"] == after_text["choices"] and after_call["usage"] == after_text["usage"]


def test_a_streamed_call_is_one_chunk_without_text(server: Server) -> None:
    text = post(server, ASKED, tools=TOOLS, stream=True).text
    *lines, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    chunks = [json.loads(line)["choices"][0] for line in lines]
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert last == "[DONE]" and chunks[-1]["finish_reason"] == "tool_calls"
    assert [call["function"] for call in calls] == [{"name": "account", "arguments": '{"id":"H89"}'}]
    assert not any(chunk["delta"].get("content") for chunk in chunks)


def test_text_of_a_fixed_length_is_no_call(server: Server) -> None:
    """A benchmark times the first piece of text: held to the end, it would be timed late."""
    text = post(server, ASKED, tools=TOOLS, stream=True, max_tokens=12, min_tokens=12, ignore_eos=True).text
    assert "tool_calls" not in text and text.count('"content"') > 3
