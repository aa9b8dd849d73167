"""The HTTP app of one embedded server: its routes, what it proves at its start, and how it fails.

`chat` answers chats and `completions` completions, both greedy. Beside them: tokenisation, the list of models, health
and the fingerprint.

A candidate with speculative decoding takes the serial path: continuous batching would drop the drafts. Every path
streams when asked to, and decodes exactly `max_tokens` tokens when `ignore_eos` and `min_tokens` say so, as vLLM does.

Not covered: which fields of a request are honoured (`request_fields`), sampling, other modalities.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import orjson
import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers import GenerationConfig

from pipeline.errors import EngineError
from pipeline.products.text.serving.chat import answer_chat
from pipeline.products.text.serving.chat_template import (
    check_template,
    find_problem,
    prepare_messages,
    tokenize_messages,
)
from pipeline.products.text.serving.completions import answer_completion
from pipeline.products.text.serving.generation import Generation
from pipeline.products.text.serving.loading import LoadedModel
from pipeline.products.text.serving.profiling import build_routes
from pipeline.products.text.serving.request_fields import FieldError
from pipeline.products.text.serving.speculation import SpeculativeManager
from pipeline.running.gpu_failures import describe_gpu_failure

PROBE_TOKENS, NUM_PROBES = 8, 3


class Server:
    """The request handlers over one loaded model."""

    def __init__(self, loaded: LoadedModel, *, trace: Path | None = None) -> None:
        self.loaded = loaded
        self._trace = trace  # file for a trace of this process
        self._start_s = int(time.time())
        self._failure: str | None = None  # of the device, in a request
        self._request_numbers = itertools.count()
        self._generation = Generation(loaded)
        self._manager = self._generation.manager

    async def probe(self) -> None:
        """Prove that chats render, and that answers are greedy: equal to each other and, where exact, to `generate`.

        Raises:
            EngineError: the chat template fails, nothing can be generated, the answers differ, or no token
                was drafted though speculation was asked for.
        """
        loaded = self.loaded
        check_template(loaded.tokenizer)
        # it repeats itself, so that prompt lookup finds something to draft
        prompt = [(7 * (i % 12 + 1)) % loaded.model.config.get_text_config().vocab_size for i in range(24)]
        try:
            answers = [await self._generate(prompt, f"probe-{i}") for i in range(NUM_PROBES)]
        except RuntimeError as error:  # most often the cache, which is made now, does not fit
            problem = describe_gpu_failure(error, remedy=self._remedy)
            problem = problem or f"{error}; when memory is short, {self._remedy}"
            raise EngineError(f"{loaded.name}: generation ended on its first request: {problem}") from None
        # the first one filled the cache of prompts: where a last bit counts the others alone are computed alike
        alike = answers if loaded.is_exact else answers[1:]
        if other := next((answer for answer in alike if answer != alike[0]), None):
            raise EngineError(
                f"{loaded.name}: the same prompt gave {alike[0]!r}, then {other!r}; the server is not greedy"
            )
        if isinstance(self._manager, SpeculativeManager):
            counts = [self._manager.take_counts(f"probe-{i}") for i in range(NUM_PROBES)]
            if counts[0] is not None and not counts[0].num_drafted:
                raise EngineError(f"{loaded.name}: asked for speculation by {counts[0].method}, drafted no token")
        if not loaded.is_exact:
            return
        inputs = torch.tensor([prompt], device=loaded.scorer.device)
        plain = loaded.scorer.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=PROBE_TOKENS)
        if plain[0, len(prompt) :].tolist() != answers[0]:
            raise EngineError(
                f"{loaded.name}: the served answer {answers[0]!r} differs from plain greedy decoding "
                f"{plain[0, len(prompt) :].tolist()!r}"
            )

    @property
    def _remedy(self) -> str:
        serving = self.loaded.serving
        return (
            f"lower serving.context_length ({serving.context_length}) or serving.concurrency ({serving.concurrency}), "
            "which the cache is sized by"
        )

    def find_failure(self) -> str | None:
        """Return why this server can't go on: its device failed, or its generation thread ended; None while it can."""
        if self._failure or self._generation.state.is_cb_alive():
            return self._failure
        error = self._manager._cb.background_thread_status.fatal_error
        problem = describe_gpu_failure(error, remedy=self._remedy) or f"the generation thread ended: {error}"
        return f"{self.loaded.name}: answering chats: {problem}"

    async def _note_failure(self, request: Request, error: Exception) -> Response:
        """Answer 500, and note what the device failed at: the answers of others would be wrong, or fail alike."""
        if problem := describe_gpu_failure(error, remedy=self._remedy):
            doing = "scoring texts" if request.url.path == "/v1/completions" else "answering chats"
            self._failure = f"{self.loaded.name}: {doing}: {problem}"
        message = " ".join(str(error).split())[:300]
        return _json({"error": {"message": message, "type": "server_error", "param": None, "code": None}}, 500)

    async def _generate(self, prompt: list[int], request_id: str) -> list[int]:
        config = self._generation_config(max_new_tokens=PROBE_TOKENS)
        _, _, tokens = await self._manager.generate_non_streaming(
            self.loaded.model,
            self.loaded.tokenizer,
            self._generation.build_inputs(prompt),
            config,
            request_id=request_id,
        )
        return [int(t) for t in tokens]

    def _generation_config(self, **changes: Any) -> GenerationConfig:
        return self._generation.build_config(**changes)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = await _read_body(request)
        self._check_model(body)
        return await answer_chat(self._generation, body, f"chat-{next(self._request_numbers)}")

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`: texts continued, or the log-likelihoods of given tokens."""
        body = await _read_body(request)
        self._check_model(body)
        return await answer_completion(self._generation, body, f"cmpl-{next(self._request_numbers)}")

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: token ids of a text, of a list of texts, or of messages as a chat would render them."""
        body = await _read_body(request)
        if "messages" in body:
            return _json({"tokens": self._tokenize_chat(body), "max_model_len": self.loaded.serving.context_length})
        prompt, special = body.get("prompt"), body.get("add_special_tokens", True)
        texts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise HTTPException(400, f"prompt: expected a text or a list of texts, got {prompt!r:.80}")
        ids = self.loaded.tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        return _json(
            {"tokens": ids[0] if isinstance(prompt, str) else ids, "max_model_len": self.loaded.serving.context_length}
        )

    def _tokenize_chat(self, body: dict[str, Any]) -> list[int]:
        tokenizer, tools = self.loaded.tokenizer, body.get("tools")
        messages = prepare_messages(tokenizer, body["messages"])
        if problem := find_problem(tokenizer, messages, tools):
            raise HTTPException(400, f"messages: {problem}")
        return tokenize_messages(tokenizer, messages, tools)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        model = {"id": self.loaded.name, "object": "model", "created": self._start_s, "owned_by": "quantgate"}
        return _json({"object": "list", "data": [model]})

    async def fingerprint(self, request: Request) -> Response:
        """`GET /v1/fingerprint`: what is loaded."""
        return _json({"fingerprint": self.loaded.fingerprint, "facts": self.loaded.facts})

    async def health(self, request: Request) -> Response:
        """`GET /health`: 503 when the generation thread has died."""
        alive = self._generation.state.is_cb_alive()
        return _json({"status": "ok" if alive else "generation thread is dead"}, 200 if alive else 503)

    def _check_model(self, body: dict[str, Any]) -> None:
        if (model := body.get("model")) != self.loaded.name:
            problem = f"this server serves {self.loaded.name!r}, got {model!r:.80}"
            raise FieldError("model", problem, code="model_not_found", status=404)

    def build_app(self) -> Starlette:
        """Return the ASGI app."""
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/fingerprint", self.fingerprint),
            Route("/health", self.health),
            *(build_routes(self._trace) if self._trace else []),
        ]
        handlers: dict[Any, Any] = {HTTPException: _render_error, Exception: self._note_failure}
        return Starlette(routes=routes, exception_handlers=handlers)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _render_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    field, code = (error.field, error.code) if isinstance(error, FieldError) else (None, None)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return _json({"error": {"message": error.detail, "type": kind, "param": field, "code": code}}, error.status_code)


async def _read_body(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"body: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, f"body: expected an object, got {type(body).__name__}")
    return body
