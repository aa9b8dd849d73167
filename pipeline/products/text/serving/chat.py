"""Answer `POST /v1/chat/completions`.

The request handler of `transformers serve` renders the messages, generates and builds the answer. Here it is bound to
one model and one request. It gets what it lacks: a check of the length, stop strings, tool calls of models for which
the library has no parser, log-probabilities, token ids, our fingerprint, and the end of a stream.

Tool calls are read out of an answer only where the request has tools. So the gate's evals, which read text, get text.

Not covered: the fields of a request (`request_fields`), sampling, other modalities.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from openai.types.chat import ChatCompletionChunk
from openai.types.completion_usage import CompletionUsage
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBWorkerDeadError, ReasoningText, ToolCall

from pipeline.products.text.serving.answer_parser import AnswerParser, build_parser
from pipeline.products.text.serving.chat_template import find_problem, prepare_messages
from pipeline.products.text.serving.cutting import CutQueue, collect
from pipeline.products.text.serving.generation import Generation
from pipeline.products.text.serving.logprobs import write_chat_scores
from pipeline.products.text.serving.request_fields import ChatRequest, read_chat
from pipeline.products.text.serving.streams import build_pieces
from pipeline.products.text.serving.tool_call_text import WrittenCall, read_calls

_MODELS = ModelManager()


async def answer_chat(generation: Generation, body: dict[str, Any], request_id: str) -> Response:
    """Answer one request.

    Raises:
        HTTPException: it can't be answered as it was asked, or the generation thread has ended.
    """
    asked, tokenizer = read_chat(body), generation.loaded.tokenizer
    messages = prepare_messages(tokenizer, body["messages"])
    generation.check_length(sum(map(_count_characters, messages)), field="messages")
    rendered = {"messages": messages, "stream": asked.streams} | ({"tools": asked.tools} if asked.tools else {})
    try:
        return await _ChatHandler(generation, asked).handle_request(rendered, request_id)
    except CBWorkerDeadError as error:
        raise HTTPException(503, str(error)) from None
    except HTTPException:
        raise
    except Exception:  # most often the template's own, of whatever type; rendered again to tell
        if problem := find_problem(tokenizer, messages, asked.tools or None):
            raise HTTPException(400, f"messages: {problem}") from None
        raise


class _ChatHandler(ChatCompletionHandler):
    """The library's handler for one request; it also stands before the manager that generates."""

    def __init__(self, generation: Generation, asked: ChatRequest) -> None:
        super().__init__(model_manager=_MODELS, generation_state=generation.state)
        self._generation, self._asked = generation, asked
        self._loaded = generation.loaded
        self._reads_calls = bool(asked.tools) and not asked.ignores_end  # text of a fixed length is no answer
        self._prompt: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._queue: CutQueue | None = None
        self._parser: AnswerParser | None = None

    # ----- what the library asks for -----

    def _validate_request(self, body: dict[str, Any]) -> None:
        """All fields have been read."""

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        return self._loaded.name, self._loaded.model, self._loaded.tokenizer

    def _build_generation_config(self, body: dict[str, Any], model_config: Any, use_cb: bool = False) -> Any:
        return self._generation.build_request_config(self._asked.max_tokens or 0, ignores_end=self._asked.ignores_end)

    def _streaming(
        self, request_id: str, model: Any, processor: Any, model_id: str, inputs: Any, gen_config: Any, gen_manager: Any
    ) -> Any:
        self._set_room(inputs, gen_config)
        parsed = self._generation.parsed_type
        response = super()._streaming(request_id, parsed, processor, model_id, inputs, gen_config, self)
        response.body_iterator = _end_stream(response.body_iterator)
        return response

    async def _non_streaming(
        self, request_id: str, model: Any, processor: Any, model_id: str, inputs: Any, gen_config: Any, gen_manager: Any
    ) -> Any:
        self._set_room(inputs, gen_config)
        if self._asked.stops:
            self.generate_streaming(model, processor, inputs, gen_config, request_id)
            assert self._queue is not None
            items = await collect(self._queue)
            num_tokens, is_stopped = self._queue.total_tokens, self._queue.is_stopped
        else:
            parser = self._parser = self._build_parser(inputs)
            text, _, tokens = await self.generate_non_streaming(model, processor, inputs, gen_config, request_id)
            items = parser.read(processor.decode(tokens)) if parser else [text]
            num_tokens, is_stopped = len(tokens), False
        content = "".join(item for item in items if type(item) is str)
        calls = [item for item in items if isinstance(item, ToolCall)]
        completion = self._build_completion(
            request_id,
            content.strip() if self._parser else content,
            model_id,
            "length" if num_tokens >= gen_config.max_new_tokens and not is_stopped else "stop",
            _build_usage(_count_tokens(inputs["input_ids"]), num_tokens),
            [_write_call(call, f"{request_id}_tool_call_{i}") for i, call in enumerate(calls)],
            "".join(item for item in items if isinstance(item, ReasoningText)).strip() or None,
        )
        return JSONResponse(completion)

    def _build_completion(
        self,
        request_id: str,
        content: str,
        model_id: str,
        finish_reason: str,
        usage: Any = None,
        tool_calls: list[Any] | None = None,
        reasoning_content: str | None = None,
    ) -> dict[str, Any]:
        if not tool_calls and self._reads_calls:
            content, calls = read_calls(content)
            tool_calls = [_write_call(call, f"{request_id}_tool_call_{i}") for i, call in enumerate(calls)]
        tool_calls = (tool_calls[:1] if self._asked.calls_once and tool_calls else tool_calls) or None
        completion = super()._build_completion(
            request_id,
            content,
            model_id,
            finish_reason="tool_calls" if tool_calls else finish_reason,
            usage=self._add_counts(request_id, usage),
            tool_calls=tool_calls,
            reasoning_content=reasoning_content,
        )
        (choice,) = completion["choices"]
        if tool_calls and not content:
            choice["message"]["content"] = None
        if self._logprobs is not None:
            choice["logprobs"] = {"content": self._logprobs, "refusal": None}
        if self._asked.returns_token_ids:
            completion["prompt_token_ids"], choice["token_ids"] = self._prompt, self._tokens
        return {**completion, "system_fingerprint": self._loaded.fingerprint}

    def _build_chunk_sse(
        self, request_id: str = "", *, finish_reason: str | None = None, usage: Any = None, **parts: Any
    ) -> str:
        if finish_reason == "length" and self._queue is not None and self._queue.is_stopped:
            finish_reason = "stop"
        chunk = super()._build_chunk_sse(request_id, finish_reason=finish_reason, **parts)
        if usage is None:
            return chunk
        usage = self._add_counts(request_id, usage)
        return chunk + (self._build_usage_sse(request_id, usage) if self._asked.includes_usage else "")

    def chunk_to_sse(self, chunk: Any) -> str:
        """Return an event, with our fingerprint."""
        chunk.system_fingerprint = self._loaded.fingerprint
        return super().chunk_to_sse(chunk)

    # ----- before the manager -----

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[Any, Any]:
        """Stream; what a stop string or a tool call asks for is cut out of the text. The parser is ours."""
        self._parser = self._build_parser(inputs)
        source, streamer = self._generation.manager.generate_streaming(
            self._loaded.model, processor, inputs, gen_config, request_id=request_id, response_parser=self._parser
        )
        build_pieces(streamer)
        reads_calls = self._reads_calls and self._asked.streams
        if not (self._asked.stops or reads_calls):
            return source, streamer
        self._queue = CutQueue(
            source, streamer, self._asked.stops, reads_calls=reads_calls, calls_once=self._asked.calls_once
        )
        return self._queue, self._queue

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        """Generate, and note the tokens where they are asked for."""
        text, num_prompt, tokens = await self._generation.manager.generate_non_streaming(
            self._loaded.model, processor, inputs, gen_config, request_id=request_id
        )
        if self._asked.returns_token_ids or self._asked.num_logprobs is not None:
            ids = inputs["input_ids"]
            self._prompt = ids if isinstance(ids, list) else ids[0].tolist()
            self._tokens = [int(token) for token in tokens]
        if self._asked.num_logprobs is not None:
            self._logprobs = await self._score(self._asked.num_logprobs)
        return text, num_prompt, tokens

    # ----- our own -----

    def _build_parser(self, inputs: Any) -> AnswerParser | None:
        generation = self._generation
        return build_parser(generation.loaded.tokenizer, generation.parsed_type, inputs["input_ids"], self._asked.tools)

    def _set_room(self, inputs: Any, config: Any) -> None:
        num_prompt = _count_tokens(inputs["input_ids"])
        config.max_new_tokens = self._generation.count_room(num_prompt, self._asked.max_tokens, field="messages")

    def _add_counts(self, request_id: str, usage: Any) -> Any:
        counts = self._generation.take_counts(request_id)
        if counts is None or (self._queue is not None and self._queue.is_stopped):  # those of what was cut off, too
            return usage
        return type(usage).model_validate({**usage.model_dump(), "speculation": counts.model_dump()})

    def _build_usage_sse(self, request_id: str, usage: Any) -> str:
        return self.chunk_to_sse(
            ChatCompletionChunk(
                id=request_id,
                created=int(time.time()),
                model=self._loaded.name,
                choices=[],
                usage=usage,
                object="chat.completion.chunk",
            )
        )

    async def _score(self, num_likely: int) -> list[dict[str, Any]]:
        """Return the log-probabilities of the answer's tokens, its end left out."""
        tokenizer, ends = self._loaded.tokenizer, self._loaded.model.generation_config.eos_token_id
        tokens = self._tokens
        if tokens and tokens[-1] in (ends if isinstance(ends, list) else [ends]):
            tokens = tokens[:-1]
        if not tokens:
            return []
        (scores,) = await self._generation.score([[*self._prompt, *tokens]], max(1, num_likely))
        return write_chat_scores(scores, tokens, tokenizer, num_likely=num_likely)


async def _end_stream(events: AsyncIterator[str]) -> AsyncIterator[str]:
    async with contextlib.aclosing(events) as stream:  # type: ignore[type-var]  # it is a generator
        async for event in stream:
            yield event
    yield "data: [DONE]\n\n"


def _count_characters(message: dict[str, Any]) -> int:
    content = message.get("content", "")
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _count_tokens(ids: Any) -> int:
    return len(ids) if isinstance(ids, list) else ids.shape[-1]


def _build_usage(num_prompt: int, num_tokens: int) -> CompletionUsage:
    return CompletionUsage(prompt_tokens=num_prompt, completion_tokens=num_tokens, total_tokens=num_prompt + num_tokens)


def _write_call(call: WrittenCall | ToolCall, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
