"""Plain prompts, continued greedily: `/v1/completions` of the embedded server, for models without a chat template.

A prompt is tokenised as the checkpoint's tokenizer does it, with the special tokens that it adds itself. An answer ends
at the first stop string, which is cut off, as vLLM does it. Stop strings are looked for in the answer alone: one that
the prompt's end and the answer's beginning make together ends nothing.

Not covered: scoring of given tokens (`scoring.py`), sampling, and stop strings in a stream.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import torch
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from transformers import StoppingCriteria

from pipeline.products.text.serving.loading import LoadedModel
from pipeline.products.text.serving.speculation import SpeculativeManager

FORGET_AFTER_S = 10.0  # a token of a request that was cancelled may still be on its way


def build_generation_config(body: dict[str, Any], model_config: Any, *, use_cache: bool) -> Any:
    """Return the model's generation config with what a request asks for."""
    config = copy.copy(model_config)  # the library's deep copy takes longer than many a token
    config.max_new_tokens, config.use_cache = body["max_tokens"], use_cache
    if body.get("ignore_eos"):
        config.eos_token_id = -1  # no token has this id; None would be filled in from the model's own config
    return config


def check_context(ids: Any, config: Any, loaded: LoadedModel) -> None:
    """Refuse a prompt that leaves too little of the context for its answer."""
    total = (len(ids) if isinstance(ids, list) else ids.shape[-1]) + config.max_new_tokens
    if total > loaded.serving.context_length:
        raise HTTPException(
            400, f"prompt plus max_tokens: expected at most {loaded.serving.context_length} tokens, got {total}"
        )


class StopStrings(StoppingCriteria):
    """Whether an answer holds a stop string yet; special tokens count as text here, as some are given as such."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, num_prompt: int) -> None:
        self._tokenizer, self._stops, self._num_prompt = tokenizer, stops, num_prompt

    def hold(self, tokens: Sequence[int]) -> bool:
        """Tell whether the answer's tokens hold one."""
        text = self._tokenizer.decode(tokens)
        return any(stop in text for stop in self._stops)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Tell it of prompts with their answers, int64 [batch, n]: transformers asks after each step."""
        held = [self.hold(ids) for ids in input_ids[:, self._num_prompt :].tolist()]
        return torch.tensor(held, device=input_ids.device)


class Completions:
    """Answers plain prompts over one loaded model and its generation manager."""

    def __init__(self, loaded: LoadedModel, manager: Any) -> None:
        self._loaded, self._manager = loaded, manager
        self._is_batched = loaded.serving.continuous_batching

    async def answer(self, body: dict[str, Any], request_id: str) -> Response:
        """Answer one request, whose fields are known to be of a greedy one.

        Raises:
            HTTPException: what is wrong with the prompt or the stop strings.
        """
        prompt, stops = body.get("prompt"), _read_stops(body)
        if not isinstance(prompt, str) or not prompt:
            raise HTTPException(400, f"prompt: expected a text, got {prompt!r:.80}")
        ids = self._loaded.tokenizer(prompt)["input_ids"]
        config = build_generation_config(body, self._loaded.model.generation_config, use_cache=not self._is_batched)
        check_context(ids, config, self._loaded)
        if body.get("stream"):
            return StreamingResponse(self._stream(ids, config, request_id), media_type="text/event-stream")
        tokens, is_stopped = await self._generate(ids, config, stops, request_id)
        text = self._loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        text = text[: min([place for stop in stops if (place := text.find(stop)) >= 0], default=None)]
        choice: dict[str, Any] = {"text": text, "finish_reason": "stop" if is_stopped else "length"}
        if body.get("return_token_ids"):
            choice |= {"prompt_token_ids": ids, "token_ids": tokens}
        return Response(
            orjson.dumps(self._build_answer(choice, self._count(len(ids), len(tokens), request_id))),
            media_type="application/json",
        )

    async def _generate(
        self, ids: list[int], config: Any, stops: Sequence[str], request_id: str
    ) -> tuple[list[int], bool]:
        """Return the tokens of an answer, and whether it ended before its limit did."""
        criteria = StopStrings(self._loaded.tokenizer, stops, num_prompt=len(ids))
        if stops and self._is_batched:
            tokens = await self._generate_batched(ids, config, criteria, request_id)
        else:
            inputs = self._place(ids) | ({"stopping_criteria": [criteria]} if stops else {})
            _, _, tokens = await self._manager.generate_non_streaming(
                self._loaded.model, self._loaded.tokenizer, inputs, config, request_id=request_id
            )
        tokens = [int(token) for token in tokens]
        return tokens, self._ends(tokens, config) or criteria.hold(tokens)

    async def _generate_batched(self, ids: list[int], config: Any, stops: StopStrings, request_id: str) -> list[int]:
        """Generate under continuous batching, which knows no stop strings: its request is cancelled at the first."""
        batching, loop = self._manager._cb, asyncio.get_running_loop()
        self._manager._check_alive(request_id)
        answer: asyncio.Future[Any] = loop.create_future()

        def take(output: Any) -> None:
            if answer.done():
                return
            if output.error is not None:
                answer.set_exception(RuntimeError(f"generation of {request_id} failed: {output.error}"))
            elif output.is_finished() or stops.hold(output.generated_tokens):
                answer.set_result(output)

        batching.register_result_handler(request_id, take)
        batching.add_request(
            ids,
            request_id=request_id,
            max_new_tokens=config.max_new_tokens,
            streaming=True,
            eos_token_id=config.eos_token_id,
        )
        output = None
        try:
            output = await answer
        finally:
            if output is None or not output.is_finished():
                batching.cancel_request(request_id)
                loop.call_later(FORGET_AFTER_S, batching.output_router.result_handlers.pop, request_id, None)
        return list(output.generated_tokens)

    async def _stream(self, ids: list[int], config: Any, request_id: str) -> AsyncIterator[bytes]:
        pieces, streamer = self._manager.generate_streaming(
            self._loaded.model, self._loaded.tokenizer, self._place(ids), config, request_id=request_id
        )
        try:
            while (piece := await pieces.get()) is not None:
                if not isinstance(piece, str):  # the library's error
                    yield _render_event({"error": {"message": piece.msg}})
                    return
                yield _render_event(self._build_answer({"text": piece, "finish_reason": None}))
            is_cut = streamer.total_tokens >= config.max_new_tokens
            end = {"text": "", "finish_reason": "length" if is_cut else "stop"}
            yield _render_event(self._build_answer(end, self._count(len(ids), streamer.total_tokens, request_id)))
        except (GeneratorExit, asyncio.CancelledError):
            streamer.cancel()
            raise

    def _place(self, ids: list[int]) -> dict[str, Any]:
        """Return a prompt as the manager takes it."""
        if self._is_batched:
            return {"input_ids": ids}
        tensor = torch.tensor([ids], device=self._loaded.model.device)
        return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}

    def _ends(self, tokens: list[int], config: Any) -> bool:
        """Tell whether the last token ends an answer by itself."""
        ends = config.eos_token_id
        return bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])

    def _count(self, num_prompt: int, num_completion: int, request_id: str) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }
        if isinstance(self._manager, SpeculativeManager):
            usage["speculation"] = self._manager.take_counts(request_id).model_dump()
        return usage

    def _build_answer(self, choice: dict[str, Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "object": "text_completion",
            "model": self._loaded.name,
            "choices": [{"index": 0, **choice}],
            "usage": usage,
            "system_fingerprint": self._loaded.fingerprint,
        }


def _read_stops(body: dict[str, Any]) -> list[str]:
    stops = body.get("stop", [])
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise HTTPException(400, f"stop: expected a list of texts, got {stops!r:.80}")
    if stops and body.get("stream"):
        raise HTTPException(400, f"stop: expected none with stream, got {stops!r:.80}")
    return stops


def _render_event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
