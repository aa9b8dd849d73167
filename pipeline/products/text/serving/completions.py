"""Answer `POST /v1/completions`: continue texts as they stand, or score the tokens of given ones, as vLLM does.

A text is tokenised with the special tokens that the tokenizer adds itself. So are models asked that have no chat
template. An answer ends at the first stop string, which is cut off.

The gate's client scores given tokens alone: it asks for an echo with token ids as names, and reads no generated
token, so none is generated for it. Any other request gets what OpenAI's API promises. lm-eval's `local-completions`
computes likelihoods that way.

Not covered: streams of several prompts, or with stop strings.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from transformers.cli.serving.utils import CBWorkerDeadError

from pipeline.products.text.serving.generation import Generated, Generation
from pipeline.products.text.serving.logprobs import TokenNames, write_scores
from pipeline.products.text.serving.request_fields import CompletionRequest, FieldError, read_completion
from pipeline.records.speculation import SpeculationCounts

NOTHING = Generated("", (), "length")


async def answer_completion(generation: Generation, body: dict[str, Any], request_id: str) -> Response:
    """Answer one request.

    Raises:
        HTTPException: it can't be answered as it was asked, or the generation thread has ended.
    """
    asked = read_completion(body)
    prompts = _read_prompts(generation, body.get("prompt"))
    if asked.streams:
        if len(prompts) > 1:
            raise FieldError("prompt", f"expected one with stream, got {len(prompts)}")
        generation.count_room(len(prompts[0]), asked.max_tokens, field="prompt")
        return StreamingResponse(_stream(generation, prompts[0], asked, request_id), media_type="text/event-stream")
    if asked.scores_alone:
        answer: dict[str, Any] = {"choices": await _score(generation, prompts, asked)}
    else:
        try:
            choices, usage = await _continue(generation, prompts, asked, request_id)
        except CBWorkerDeadError as error:
            raise HTTPException(503, str(error)) from None
        answer = {"id": request_id, "created": int(time.time()), "choices": choices, "usage": usage}
    return Response(orjson.dumps(_head(generation) | answer), media_type="application/json")


def _head(generation: Generation) -> dict[str, Any]:
    """Return what every answer says."""
    loaded = generation.loaded
    return {"object": "text_completion", "model": loaded.name, "system_fingerprint": loaded.fingerprint}


async def _stream(
    generation: Generation, ids: list[int], asked: CompletionRequest, request_id: str
) -> AsyncIterator[bytes]:
    """Yield a text's continuation as it comes, what it cost where that is asked for, and the end."""
    config = generation.build_request_config(asked.max_tokens, ignores_end=asked.ignores_end)
    pieces, streamer = generation.manager.generate_streaming(
        generation.loaded.model,
        generation.loaded.tokenizer,
        generation.build_inputs(ids),
        config,
        request_id=request_id,
    )
    head = _head(generation) | {"id": request_id, "created": int(time.time())}

    def render(text: str, finish_reason: str | None = None) -> bytes:
        return _render_event(head | {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})

    try:
        while (piece := await pieces.get()) is not None:
            if not isinstance(piece, str):  # the library's error
                yield _render_event({"error": {"message": piece.msg}})
                return
            yield render(piece)
        yield render("", "length" if streamer.total_tokens >= asked.max_tokens else "stop")
        counts = generation.take_counts(request_id)
        if asked.includes_usage:
            yield _render_event(head | {"choices": [], "usage": _count(len(ids), streamer.total_tokens, counts)})
        yield b"data: [DONE]\n\n"
    except (GeneratorExit, asyncio.CancelledError):
        streamer.cancel()
        raise


def _render_event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _count(num_prompt: int, num_completion: int, speculation: SpeculationCounts | None) -> dict[str, Any]:
    """Return what answers cost, in OpenAI's form, and what was drafted for them."""
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
    return usage | ({"speculation": speculation.model_dump()} if speculation else {})


async def _score(generation: Generation, prompts: list[list[int]], asked: CompletionRequest) -> list[dict[str, Any]]:
    longest = generation.loaded.serving.context_length + 1  # the last token is predicted, never fed
    for i, ids in enumerate(prompts):
        if not 2 <= len(ids) <= longest:
            raise FieldError(f"prompt.{i}", f"expected 2 to {longest} tokens, got {len(ids)}")
    scores, names = await generation.score(prompts, asked.num_logprobs or 1), TokenNames(None)
    return [
        {"index": i, "text": "", "finish_reason": "length", "logprobs": write_scores(row, names)}
        for i, row in enumerate(scores)
    ]


async def _continue(
    generation: Generation, prompts: list[list[int]], asked: CompletionRequest, request_id: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a choice for each prompt, and what they cost."""
    for ids in prompts:
        generation.count_room(len(ids), asked.max_tokens, field="prompt")

    async def generate(number: int, ids: list[int]) -> Generated:
        name = f"{request_id}-{number}"
        return await generation.generate(
            ids, max_tokens=asked.max_tokens, request_id=name, stops=asked.stops, ignores_end=asked.ignores_end
        )

    answers = [NOTHING] * len(prompts)
    if asked.max_tokens:
        answers = await asyncio.gather(*(generate(i, ids) for i, ids in enumerate(prompts)))
    choices: list[dict[str, Any]] = []
    for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = generation.loaded.tokenizer.decode(ids) if asked.echoes else ""
        choices.append({"index": i, "text": text + answer.text, "finish_reason": answer.finish_reason})
        if asked.returns_token_ids:
            choices[i] |= {"prompt_token_ids": ids, "token_ids": answer.tokens}
    if asked.num_logprobs is not None:
        sequences = [[*ids, *answer.tokens] for ids, answer in zip(prompts, answers, strict=True)]
        for choice, ids, logprobs in zip(
            choices, prompts, await _name_scores(generation, sequences, asked), strict=True
        ):
            first = 0 if asked.echoes else len(ids)
            choice["logprobs"] = {name: values[first:] for name, values in logprobs.items()}
    counts = [generation.take_counts(f"{request_id}-{i}") for i in range(len(prompts))]
    num_generated = sum(len(answer.tokens) for answer in answers)
    return choices, _count(sum(map(len, prompts)), num_generated, counts[0] if len(counts) == 1 else None)


def _read_prompts(generation: Generation, value: Any) -> list[list[int]]:
    """Return the token ids of each prompt: a text, a list of texts, token ids, or a list of lists of them."""
    loaded = generation.loaded
    vocabulary = loaded.model.config.get_text_config().vocab_size
    is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not prompts:
        raise FieldError("prompt", f"expected a text, token ids, or a list of either, got {value!r:.80}")
    ids_by_prompt = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            generation.check_length(len(prompt), field=f"prompt.{i}")
        ids = loaded.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < vocabulary for t in ids):
            raise FieldError(f"prompt.{i}", f"expected a text or token ids below {vocabulary}")
        if not ids:
            raise FieldError(f"prompt.{i}", "expected one token or more, got none")
        ids_by_prompt.append(ids)
    return ids_by_prompt


async def _name_scores(
    generation: Generation, sequences: list[list[int]], asked: CompletionRequest
) -> list[dict[str, list[Any]]]:
    """Return the log-probabilities of each sequence in OpenAI's form; the first token of all has none."""
    names = TokenNames(None if asked.names_ids else generation.loaded.tokenizer)
    scored = iter(await generation.score([ids for ids in sequences if len(ids) > 1], asked.num_logprobs or 1))
    unscored: dict[str, list[Any]] = {"token_logprobs": [None], "top_logprobs": [None]}
    named = []
    for ids in sequences:
        tokens: list[Any] = [names[token] for token in ids]
        offsets: list[Any] = [0, *itertools.accumulate(map(len, tokens))][:-1]
        scores = write_scores(next(scored), names) if len(ids) > 1 else unscored
        named.append({"tokens": tokens, "text_offset": offsets, **scores})
    return named
