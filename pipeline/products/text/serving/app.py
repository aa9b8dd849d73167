"""The HTTP app of one embedded server.

Chat goes through the request handler and the continuous batching of `transformers serve`, greedy
only. That app would ignore other temperatures, stop strings, logprobs and n without a word; here they are
a 400. Beside it: plain prompts (`completions.py`), scoring of given tokens in vLLM's format, tokenisation, and the
fingerprint.

A candidate with speculative decoding takes the serial path: continuous batching would drop the drafts. Every path
streams when asked to, and decodes exactly `max_tokens` tokens when `ignore_eos` and `min_tokens` say so, as vLLM does.

Not covered: sampling, other modalities.
"""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBWorkerDeadError, GenerationState, Modality

from pipeline.errors import EngineError
from pipeline.products.text.serving.chat_template import check_template, find_problem
from pipeline.products.text.serving.completions import Completions, build_generation_config, check_context
from pipeline.products.text.serving.loading import LoadedModel
from pipeline.products.text.serving.profiling import build_routes
from pipeline.products.text.serving.scoring import SequenceScores, score_sequences
from pipeline.products.text.serving.speculation import SpeculativeManager
from pipeline.running.gpu_failures import describe_gpu_failure

EXACT_LENGTH_FIELDS = frozenset({"ignore_eos", "min_tokens"})
GREEDY_FIELDS = frozenset(
    {"model", "max_tokens", "temperature", "return_token_ids", "stream", "stream_options", *EXACT_LENGTH_FIELDS}
)
CHAT_FIELDS = GREEDY_FIELDS | {"messages", "tools"}
COMPLETION_FIELDS = GREEDY_FIELDS | {"prompt", "stop"}
MAX_TOP_LOGPROBS = 100
PROBE_TOKENS, NUM_PROBES = 8, 3


class Server:
    """The request handlers over one loaded model."""

    def __init__(self, loaded: LoadedModel, *, trace: Path | None = None) -> None:
        self.loaded = loaded
        self._trace = trace  # file for a trace of this process
        self._failure: str | None = None  # of the device, in a request
        self._request_numbers = itertools.count()
        self._scoring = ThreadPoolExecutor(1, "scoring")
        batching, speculative = loaded.serving.continuous_batching, loaded.serving.speculative
        if batching and speculative:
            raise EngineError(f"{loaded.name}: continuous batching drops speculation; serve it on the serial path")
        self._state = GenerationState(continuous_batching=batching, cb_config=loaded.batching.config)
        self._manager = (
            SpeculativeManager(loaded, speculative)
            if speculative
            else self._state.get_manager(loaded.name, use_cb=batching)
        )
        if batching:
            self._start_batching()
        self._chat = _make_chat_handler(loaded, ModelManager(), self._state, self._manager)
        self._completions = Completions(loaded, self._manager)

    def _start_batching(self) -> None:
        model = self.loaded.model
        model.set_attn_implementation(self.loaded.batching.attention)
        # the first config is the one every request gets, so it is set here and not by a request
        self._manager.init_cb(model, self._generation_config(use_cache=False))

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
            if not counts[0].num_drafted:
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
        if self._failure or self._state.is_cb_alive():
            return self._failure
        error = self._manager._cb.background_thread_status.fatal_error
        problem = describe_gpu_failure(error, remedy=self._remedy) or f"the generation thread ended: {error}"
        return f"{self.loaded.name}: answering chats: {problem}"

    async def _note_failure(self, request: Request, error: Exception) -> Response:
        """Answer 500, and note what the device failed at: the answers of others would be wrong, or fail alike."""
        if problem := describe_gpu_failure(error, remedy=self._remedy):
            doing = "scoring texts" if request.url.path == "/v1/completions" else "answering chats"
            self._failure = f"{self.loaded.name}: {doing}: {problem}"
        return _json({"error": {"message": " ".join(str(error).split())[:300], "code": 500}}, 500)

    async def _generate(self, prompt: list[int], request_id: str) -> list[int]:
        config = self._generation_config(max_new_tokens=PROBE_TOKENS)
        inputs: dict[str, Any] = {"input_ids": prompt}
        if not self.loaded.serving.continuous_batching:
            ids = torch.tensor([prompt], device=self.loaded.model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        _, _, tokens = await self._manager.generate_non_streaming(
            self.loaded.model, self.loaded.tokenizer, inputs, config, request_id=request_id
        )
        return [int(t) for t in tokens]

    def _generation_config(self, **changes: Any) -> GenerationConfig:
        return GenerationConfig.from_dict(self.loaded.model.generation_config.to_dict() | changes)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`: greedy, with an explicit `max_tokens`."""
        body = await _read_body(request)
        _check_greedy(body, CHAT_FIELDS)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise HTTPException(400, "messages: expected at least one message")
        self._check_model(body)
        try:
            return await self._chat.answer(body, f"chat-{next(self._request_numbers)}")
        except CBWorkerDeadError as error:
            raise HTTPException(503, str(error)) from None
        except HTTPException:
            raise
        except Exception:  # most often the template's own, of whatever type; rendered again to tell
            if problem := find_problem(self.loaded.tokenizer, body["messages"], body.get("tools")):
                raise HTTPException(400, f"messages: {problem}") from None
            raise

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`: a prompt as it stands, continued greedily; with `echo` given tokens are scored."""
        body = await _read_body(request)
        if "echo" in body:
            return await self._score(body)
        _check_greedy(body, COMPLETION_FIELDS)
        self._check_model(body)
        try:
            return await self._completions.answer(body, f"completion-{next(self._request_numbers)}")
        except CBWorkerDeadError as error:
            raise HTTPException(503, str(error)) from None

    async def _score(self, body: dict[str, Any]) -> Response:
        """Return log-likelihoods of prompts given as token ids; generates nothing."""
        self._check_model(body)
        prompts, num_top = body.get("prompt"), body.get("logprobs")
        if body.get("echo") is not True or body.get("max_tokens") not in (0, 1):
            raise HTTPException(400, "this endpoint scores given tokens: expected echo true and max_tokens 0 or 1")
        if not isinstance(num_top, int) or not 1 <= num_top <= MAX_TOP_LOGPROBS:
            raise HTTPException(400, f"logprobs: expected 1 to {MAX_TOP_LOGPROBS}, got {num_top!r}")
        run = partial(
            score_sequences,
            self.loaded.scorer,
            self._check_prompts(prompts),
            num_top=num_top,
            max_forward_tokens=self.loaded.batching.max_forward_tokens,
        )
        scores = await asyncio.get_running_loop().run_in_executor(self._scoring, run)
        choices = [
            {"index": i, "text": "", "finish_reason": "length", "logprobs": _render(s)} for i, s in enumerate(scores)
        ]
        return _json(
            {
                "object": "text_completion",
                "model": self.loaded.name,
                "choices": choices,
                "system_fingerprint": self.loaded.fingerprint,
            }
        )

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
        if problem := find_problem(self.loaded.tokenizer, body["messages"], body.get("tools")):
            raise HTTPException(400, f"messages: {problem}")
        messages = ChatCompletionHandler.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
        return self.loaded.tokenizer.apply_chat_template(
            messages, tools=body.get("tools"), add_generation_prompt=True, return_dict=True
        )["input_ids"]

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return _json({"object": "list", "data": [{"id": self.loaded.name, "object": "model"}]})

    async def fingerprint(self, request: Request) -> Response:
        """`GET /v1/fingerprint`: what is loaded."""
        return _json({"fingerprint": self.loaded.fingerprint, "facts": self.loaded.facts})

    async def health(self, request: Request) -> Response:
        """`GET /health`: 503 when the generation thread has died."""
        alive = self._state.is_cb_alive()
        return _json({"status": "ok" if alive else "generation thread is dead"}, 200 if alive else 503)

    def _check_model(self, body: dict[str, Any]) -> None:
        if body.get("model") != self.loaded.name:
            raise HTTPException(404, f"model: this server serves {self.loaded.name!r}, got {body.get('model')!r}")

    def _check_prompts(self, prompts: Any) -> list[list[int]]:
        vocabulary = self.loaded.model.config.get_text_config().vocab_size
        longest = self.loaded.serving.context_length + 1  # the last token is predicted, never fed
        if not isinstance(prompts, list) or not prompts:
            raise HTTPException(400, "prompt: expected a list of token-id lists")
        for i, ids in enumerate(prompts):
            if not isinstance(ids, list) or not all(isinstance(t, int) and 0 <= t < vocabulary for t in ids):
                raise HTTPException(400, f"prompt.{i}: expected token ids below {vocabulary}")
            if not 2 <= len(ids) <= longest:
                raise HTTPException(400, f"prompt.{i}: expected 2 to {longest} tokens, got {len(ids)}")
        return prompts

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


def _make_chat_handler(loaded: LoadedModel, models: Any, state: Any, manager: Any) -> Any:
    class ChatHandler(ChatCompletionHandler):
        """The library's handler, bound to one model, with a length check, token ids and our fingerprint."""

        async def answer(self, body: dict[str, Any], request_id: str) -> Response:
            """Answer one request; `return_token_ids` is vLLM's extension, which the library does not know."""
            if not body.pop("return_token_ids", False):
                return await self.handle_request(body, request_id)
            noting.token_ids[request_id] = ([], [])
            try:
                return await self.handle_request(body, request_id)
            finally:
                del noting.token_ids[request_id]

        def _validate_request(self, body: dict[str, Any]) -> None:
            super()._validate_request({key: body[key] for key in body.keys() - EXACT_LENGTH_FIELDS})

        def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
            return loaded.name, loaded.model, loaded.tokenizer

        def _build_generation_config(self, body: dict[str, Any], model_config: Any, use_cb: bool = False) -> Any:
            return build_generation_config(body, model_config, use_cache=not use_cb)

        def _streaming(
            self,
            request_id: str,
            model: Any,
            processor: Any,
            model_id: str,
            inputs: Any,
            gen_config: Any,
            gen_manager: Any,
        ) -> Any:
            check_context(inputs["input_ids"], gen_config, loaded)
            return super()._streaming(request_id, model, processor, model_id, inputs, gen_config, manager)

        async def _non_streaming(
            self,
            request_id: str,
            model: Any,
            processor: Any,
            model_id: str,
            inputs: Any,
            gen_config: Any,
            gen_manager: Any,
        ) -> Any:
            check_context(inputs["input_ids"], gen_config, loaded)
            return await super()._non_streaming(request_id, model, processor, model_id, inputs, gen_config, noting)

        def _build_completion(self, request_id: str, *args: Any, usage: Any, **kwargs: Any) -> dict[str, Any]:
            completion = super()._build_completion(request_id, *args, usage=add_counts(request_id, usage), **kwargs)
            if id_lists := noting.token_ids.get(request_id):
                completion["prompt_token_ids"], completion["choices"][0]["token_ids"] = id_lists
            return {**completion, "system_fingerprint": loaded.fingerprint}

        def _build_chunk_sse(self, request_id: str = "", *args: Any, usage: Any = None, **kwargs: Any) -> str:
            usage = usage and add_counts(request_id, usage)  # the last chunk alone has it
            return super()._build_chunk_sse(request_id, *args, usage=usage, **kwargs)

        def chunk_to_sse(self, chunk: Any) -> str:
            chunk.system_fingerprint = loaded.fingerprint
            return super().chunk_to_sse(chunk)

    def add_counts(request_id: str, usage: Any) -> Any:
        if not isinstance(manager, SpeculativeManager):
            return usage
        counts = manager.take_counts(request_id).model_dump()
        return type(usage).model_validate({**usage.model_dump(), "speculation": counts})

    noting = _NotingManager(manager)
    return ChatHandler(model_manager=models, generation_state=state)


class _NotingManager:
    """Stands before a generation manager and notes the token ids of requests that want them."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.token_ids: dict[str, tuple[list[int], list[int]]] = {}  # prompt and answer, by request

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> Any:
        text, num_prompt, tokens = await self._manager.generate_non_streaming(
            model, processor, inputs, gen_config, request_id=request_id
        )
        if request_id in self.token_ids:
            ids = inputs["input_ids"]
            self.token_ids[request_id] = (ids if isinstance(ids, list) else ids[0].tolist(), [int(t) for t in tokens])
        return text, num_prompt, tokens


def _check_greedy(body: dict[str, Any], fields: frozenset[str]) -> None:
    """Refuse a field that would be ignored, a request that is not greedy, and one without its own limit."""
    if unknown := sorted(body.keys() - fields):
        raise HTTPException(400, f"unsupported field {unknown[0]!r}; supported: {', '.join(sorted(fields))}")
    if body.get("temperature") != 0:
        raise HTTPException(400, f"temperature: expected 0, got {body.get('temperature')!r}")
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        raise HTTPException(400, f"max_tokens: expected a positive integer, got {body.get('max_tokens')!r}")
    _check_streaming_and_length(body)


def _check_streaming_and_length(body: dict[str, Any]) -> None:
    """Refuse a request that would be served otherwise than it was asked for."""
    if not isinstance(body.get("stream", False), bool):
        raise HTTPException(400, f"stream: expected true or false, got {body['stream']!r}")
    if body.get("stream_options", {"include_usage": True}) != {"include_usage": True}:
        raise HTTPException(400, f"stream_options: expected include_usage true, got {body['stream_options']!r}")
    exact = {name: body[name] for name in sorted(EXACT_LENGTH_FIELDS & body.keys())}
    if exact not in ({}, {"ignore_eos": True, "min_tokens": body["max_tokens"]}):
        raise HTTPException(
            400,
            "ignore_eos and min_tokens: expected true and the number of max_tokens "
            f"({body['max_tokens']}), or neither field, got {exact!r}",
        )


def _render(scores: SequenceScores) -> dict[str, Any]:
    """Return one choice's logprobs in vLLM's form, where a token is written "token_id:<id>"."""
    tops = [
        None,
        *(
            dict(zip(names, values, strict=True))
            for names, values in zip(
                (["token_id:%d" % i for i in row] for row in scores.top_ids.tolist()),  # noqa: UP031 - twice as fast
                scores.top_logprobs.astype("float64").round(6).tolist(),
                strict=True,
            )
        ),
    ]
    return {"token_logprobs": [None, *scores.token_logprobs.astype("float64").round(6).tolist()], "top_logprobs": tops}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _render_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": {"message": error.detail, "code": error.status_code}}, error.status_code)


async def _read_body(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"body: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, f"body: expected an object, got {type(body).__name__}")
    return body
