"""The model that lm-eval sees: it hands each request to the one client of the endpoint.

Not covered: lm-eval's request cache, which has no model in its key, and its chat templates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from lm_eval.api.model import LM

from pipeline.errors import EngineError, SettingsError
from pipeline.products.text.evals.bridge import Bridge
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.framing import read_frame, rolling_windows
from pipeline.products.text.evals.generation import (
    GENERATE,
    Answer,
    Question,
    answer_question,
    check_questions_fit,
    digest_request,
    name_case,
    name_cluster,
    read_question,
)
from pipeline.products.text.serving.client import TokenScores
from pipeline.products.text.serving.engines.engine import gather
from pipeline.products.text.serving.failures import prepare, say_kept
from pipeline.running.progress import Progress
from pipeline.running.shards import choose_batches

CHUNK_REQUESTS = 64  # asked together
_ADDED = 8  # tokens round a text, at most
CHUNKS_AHEAD = 4  # chunks in progress for as many places: no server waits for a chunk to be made or read
T = TypeVar("T")


class EndpointLM(LM):
    """The model that lm-eval sees. Its methods are called in a worker thread, beside the event loop."""

    def __init__(self, context: EvalContext, bridge: Bridge) -> None:
        super().__init__()
        self._context = context
        self._wait = bridge.wait
        with prepare(context.name):
            self._frame = self._wait(read_frame(context.client, context.checkpoint))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (sum of log-probabilities, whether greedy decoding gives it) of each continuation.

        Raises:
            SettingsError: a context with its continuation is too long for the server.
        """
        limit = self._context.context_length

        def check(some: list[Any]) -> None:
            # whose text has fewer bytes than that has fewer tokens, but for what Unicode spells out
            self._encode_fitting([r for r in some if len("".join(r.args).encode()) > limit - _ADDED])

        def ask(some: list[Any]) -> list[tuple[float, bool]]:
            encoded = self._encode_fitting(some)
            scores = self._wait(self._context.client.score([c + t for c, t in encoded], top_logprobs=1))
            return [_sum_continuation(s, t) for s, (_, t) in zip(scores, encoded, strict=True)]

        answers = self._answer("loglikelihood", requests, ask, unasked=(0.0, False), check=check)
        return [(value, greedy) for value, greedy in answers]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text."""

        def ask(some: list[Any]) -> list[float]:
            size = self._context.context_length
            texts = [request.args[0] for request in some]
            tokens = [self._frame.frame_document(ids) for ids in self._tokenize(texts)]
            windows = [rolling_windows(t, first=self._frame.first, max_tokens=size) for t in tokens]
            flat = [ids for document in windows for ids, _ in document]
            scores = iter(self._wait(self._context.client.score(flat, top_logprobs=1)))
            return [sum(float(next(scores).token_logprobs[-n:].sum()) for _, n in document) for document in windows]

        return self._answer("loglikelihood_rolling", requests, ask, unasked=0.0)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy answer to each prompt, up to its stop string.

        Raises:
            SettingsError: a prompt is too long for the context, or the task samples.
        """
        journal = self._context.journal
        waiting = [r for r in requests if not journal.holds(digest_request(GENERATE, r.args))]
        questions = [read_question(self._context.name, request) for request in waiting]
        with prepare(self._context.name):
            self._wait(check_questions_fit(self._context, questions))

        def ask(some: list[Any]) -> list[Any]:
            questions = [read_question(self._context.name, request) for request in some]
            return [answer.model_dump(mode="json") for answer in self._wait(self._generate(questions))]

        answers = self._answer(GENERATE, requests, ask, unasked=None)
        return ["" if answer is None else str(answer["text"]) for answer in answers]

    def _answer(
        self,
        kind: str,
        requests: list[Any],
        ask: Callable[[list[Any]], list[T]],
        *,
        unasked: T,
        check: Callable[[list[Any]], None] = lambda some: None,
    ) -> list[T]:
        """Ask for what the journal does not hold yet, as many chunks at once as keep all servers busy; journal each.

        Args:
            kind: of the requests.
            requests: lm-eval's instances.
            ask: returns the answers to some of them.
            unasked: stands for the answers of other shards, which nobody reads.
            check: refuses some of those that will be asked, before any is.
        """
        journal, shard = self._context.journal, self._context.shard
        keys = [digest_request(kind, request.args) for request in requests]
        # the same ones share a request in every run, as that may change a last bit
        chunks = [range(len(keys))[start : start + CHUNK_REQUESTS] for start in range(0, len(keys), CHUNK_REQUESTS)]
        if shard is not None:
            clusters = [name_cluster(request.doc) for request in requests]
            chunks = choose_batches(chunks, shard, lambda chunk: [clusters[i] for i in chunk])
        # of equal requests the first one counts, whichever chunk is answered first, and whichever shard has it
        first = {keys[i]: i for i in reversed(range(len(keys)))}
        own = {chunk: [i for i in chunk if first[keys[i]] == i] for chunk in chunks}
        num_requests = sum(map(len, own.values()))
        chunks = [chunk for chunk in chunks if not all(journal.holds(keys[i]) for i in own[chunk])]
        with prepare(self._context.name):
            for chunk in chunks:
                check([requests[i] for i in own[chunk]])
        num_kept = num_requests - sum(len(own[chunk]) for chunk in chunks)
        progress = Progress(self._context.name, total=num_requests, kept=num_kept, unit="requests")
        with ThreadPoolExecutor(CHUNKS_AHEAD * math.ceil(self._context.places.count / CHUNK_REQUESTS)) as pool:
            asked = {pool.submit(ask, [requests[i] for i in chunk]): chunk for chunk in chunks}
            failed: Exception | None = None
            for answers in as_completed(asked):  # after a failure too: what is at work by then may be answered
                try:
                    chunk = asked[answers]
                    for i, answer in zip(chunk, answers.result(), strict=True):
                        if i in own[chunk] and not journal.holds(keys[i]):
                            journal.add_text(keys[i], json.dumps(answer))
                    num_kept += len(own[chunk])
                    progress.advance(len(own[chunk]))
                except Exception as error:
                    failed = failed or error
                    for waiting in asked:  # not by the pool's shutdown, of which `as_completed` would hear nothing
                        waiting.cancel()
        if type(failed) is EngineError:  # and not of one request, which is refused again
            raise say_kept(failed, self._context.name, num_kept, num_requests, "requests") from None
        if failed:
            raise failed
        return [unasked if (text := journal.find_text(key)) is None else json.loads(text) for key in keys]

    async def _generate(self, questions: list[Question]) -> list[Answer]:
        async def answer(question: Question) -> Answer:
            async with self._context.take_place():
                return await answer_question(self._context, question)

        return await gather(*map(answer, questions))

    def _encode_fitting(self, requests: list[Any]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of contexts and continuations; refuse to ask where a question would lose its beginning.

        Raises:
            SettingsError: names the first case that is too long, its tokens and the limit; or one whose answer has no
                token of its own.
        """
        encoded, limit = self._encode_pairs([request.args for request in requests]), self._context.context_length
        for request, (context, continuation) in zip(requests, encoded, strict=True):
            if not continuation:
                case = name_case(request.task_name, request.doc, request.doc_id)
                raise SettingsError(
                    f"evals.{self._context.name}: expected an answer of a token or more behind the question of case "
                    f"{case!r}, got {request.args[1]!r}, which is empty or which the tokenizer makes one with the "
                    "question; correct the case, or the task's target_delimiter"
                )
            if (size := len(context) + len(continuation) - 1) > limit:  # the last token is predicted, never read
                case = name_case(request.task_name, request.doc, request.doc_id)
                raise SettingsError(
                    f"evals.{self._context.name}: the question of case {case!r} is too long: with an answer {size} "
                    f"tokens, above serving.context_length {limit}; raise the length, lower num_fewshot, or shorten "
                    "the case"
                )
        return encoded

    def _encode_pairs(self, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Split each text where lm-eval does: spaces at the end of a context go to the continuation."""
        moved = [(c.rstrip(), c[len(c.rstrip()) :] + t) if c.rstrip() else ("", c + t) for c, t in pairs]
        contexts = list(dict.fromkeys(c for c, _ in moved if c))
        sizes = {
            c: len(self._frame.frame_context(ids)) for c, ids in zip(contexts, self._tokenize(contexts), strict=True)
        }
        whole = iter(self._tokenize([c + t for c, t in moved]))
        result = []
        for context, _ in moved:
            if context:
                ids, size = self._frame.frame_context(next(whole)), sizes[context]
                result.append((ids[:size], ids[size:]))
                continue
            ids, first = next(whole), self._frame.first
            result.append((ids[:1], ids[1:]) if ids[0] == first else ([first], ids))
        return result

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self._wait(self._context.client.tokenize(texts, add_special_tokens=False)) if texts else []


class Recorder(LM):
    """Keeps what lm-eval asks of a model, by kind, and answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, list[Any]] = {}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Keep pairs of context and continuation."""
        self.requests["loglikelihood"] = requests
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Keep whole texts."""
        self.requests["loglikelihood_rolling"] = requests
        return [0.0] * len(requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Keep prompts."""
        self.requests[GENERATE] = requests
        return [""] * len(requests)


def _sum_continuation(scores: TokenScores, continuation: list[int]) -> tuple[float, bool]:
    size = len(continuation)
    greedy = scores.top_ids[-size:, 0].tolist() == continuation
    return float(scores.token_logprobs[-size:].astype("float64").sum()), greedy
