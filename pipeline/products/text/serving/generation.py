"""Generate and score token ids with one loaded model: what chats and completions share.

Generation is that of `transformers serve`: continuous batching, or one request after another, with drafts where the
candidate has them. Scores are those of `scoring`, computed in a thread of their own.

Not covered: the fields of requests, and the form of answers.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.cli.serving.utils import GenerationState

from pipeline.errors import EngineError
from pipeline.products.text.serving.chat_template import choose_parsed_type
from pipeline.products.text.serving.loading import LoadedModel
from pipeline.products.text.serving.request_fields import FieldError
from pipeline.products.text.serving.scoring import SequenceScores, score_sequences
from pipeline.products.text.serving.speculation import SpeculativeManager
from pipeline.products.text.serving.streams import SerialManager
from pipeline.records.speculation import SpeculationCounts

FORGET_AFTER_S = 10.0  # a token of a request that was cancelled may still be on its way
_SLACK = 4  # of a text's length in characters, as a tokenizer may join or drop some before it counts


@dataclass(frozen=True)
class Generated:
    """The greedy continuation of one prompt."""

    text: str  # up to the first stop string
    tokens: tuple[int, ...]  # up to the one that completes a stop string
    finish_reason: str  # "stop" or "length"


class StopStrings(StoppingCriteria):
    """Whether an answer holds a stop string yet; special tokens count as text here, as some are given as such.

    Looked for in the answer alone: one that the prompt's end and the answer's beginning make together ends nothing.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, num_prompt: int) -> None:
        self._tokenizer, self._stops, self._num_prompt = tokenizer, stops, num_prompt

    def hold(self, tokens: Sequence[int]) -> bool:
        """Tell whether the answer's tokens hold one."""
        text = self._tokenizer.decode(tokens)
        return any(stop in text for stop in self._stops)

    def count_kept(self, tokens: Sequence[int]) -> int:
        """Return how many of an answer's tokens there are up to the one that completes a stop string.

        Args:
            tokens: of the answer; it may go on for some tokens behind the stop string, as steps of several tokens do.
        """
        count = len(tokens)
        while self.hold(tokens[: count - 1]):
            count -= 1
        return count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Tell it of prompts with their answers, int64 [batch, n]: transformers asks after each step."""
        held = [self.hold(ids) for ids in input_ids[:, self._num_prompt :].tolist()]
        return torch.tensor(held, device=input_ids.device)


class Generation:
    """One loaded model, and the library's manager that generates with it."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Choose the manager; with continuous batching its thread starts.

        Raises:
            EngineError: the candidate asks for both continuous batching and drafts.
        """
        self.loaded = loaded
        batching, speculative = loaded.serving.continuous_batching, loaded.serving.speculative
        if batching and speculative:
            raise EngineError(f"{loaded.name}: continuous batching drops speculation; serve it on the serial path")
        self.state = GenerationState(continuous_batching=batching, cb_config=loaded.batching.config)
        self.manager: Any
        if speculative:
            self.manager = SpeculativeManager(loaded, speculative)
        elif batching:
            self.manager = self.state.get_manager(loaded.name, use_cb=True)
        else:
            self.manager = SerialManager(loaded)
        self._scoring = ThreadPoolExecutor(1, "scoring")
        longest = max(map(len, loaded.tokenizer.get_vocab()), default=1)
        self._most_characters = _SLACK * longest * loaded.serving.context_length
        if batching:
            loaded.model.set_attn_implementation(loaded.batching.attention)
            # the first config is the one every request gets, so it is set here and not by a request
            self.manager.init_cb(loaded.model, self.build_config(use_cache=False))

    @cached_property
    def parsed_type(self) -> Any:
        """What the library parses answers as those of, see `choose_parsed_type`."""
        return choose_parsed_type(self.loaded.tokenizer, self.loaded.model)

    def build_config(self, **changes: Any) -> GenerationConfig:
        """Return the model's own config with some changes."""
        return GenerationConfig.from_dict(self.loaded.model.generation_config.to_dict() | changes)

    def build_request_config(self, max_tokens: int, *, ignores_end: bool = False) -> Any:
        """Return the config of one request; one that ignores the end of an answer decodes `max_tokens` tokens."""
        config = copy.copy(self.loaded.model.generation_config)  # a deep copy takes longer than many a token
        config.max_new_tokens, config.use_cache = max_tokens, not self.loaded.serving.continuous_batching
        if ignores_end:
            config.eos_token_id = -1  # no token has this id; None would be filled in from the model's own config
        return config

    def build_inputs(self, prompt: list[int]) -> dict[str, Any]:
        """Return token ids as the manager takes them."""
        if self.loaded.serving.continuous_batching:
            return {"input_ids": prompt}
        ids = torch.tensor([prompt], device=self.loaded.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def count_room(self, num_prompt: int, max_tokens: int | None, *, field: str) -> int:
        """Return the number of tokens to generate at most: as asked, or as many as the context has room for.

        Raises:
            FieldError: the prompt and they don't fit; names the field of the prompt.
        """
        length = self.loaded.serving.context_length
        total = num_prompt + (1 if max_tokens is None else max_tokens)
        if total > length:
            problem = f"expected at most {length} tokens with those to generate, got {total}"
            raise FieldError(field, problem, code="context_length_exceeded")
        return length - num_prompt if max_tokens is None else max_tokens

    def check_length(self, num_characters: int, *, field: str) -> None:
        """Refuse a text that can't fit before it is tokenised: 50 MB take a minute, in which nobody else is served.

        Raises:
            FieldError: names the field of the text.
        """
        if num_characters > self._most_characters:
            length = self.loaded.serving.context_length
            problem = f"expected at most {length} tokens, got a text of {num_characters:,} characters"
            raise FieldError(field, problem, code="context_length_exceeded")

    async def generate(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        request_id: str,
        stops: Sequence[str] = (),
        ignores_end: bool = False,
    ) -> Generated:
        """Continue a prompt, up to a stop string or the end."""
        tokenizer, config = self.loaded.tokenizer, self.build_request_config(max_tokens, ignores_end=ignores_end)
        criteria = StopStrings(tokenizer, stops, num_prompt=len(prompt))
        if stops and self.loaded.serving.continuous_batching:
            found = await self._generate_batched(prompt, config, criteria, request_id)
        else:
            inputs = self.build_inputs(prompt) | ({"stopping_criteria": [criteria]} if stops else {})
            _, _, found = await self.manager.generate_non_streaming(
                self.loaded.model, tokenizer, inputs, config, request_id=request_id
            )
        tokens = tuple(int(token) for token in found)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        text = text[: min([place for stop in stops if (place := text.find(stop)) >= 0], default=None)]
        is_stopped = _ends(tokens, config) or criteria.hold(tokens)
        return Generated(text, tokens, "stop" if is_stopped else "length")

    async def _generate_batched(
        self, prompt: list[int], config: Any, stops: StopStrings, request_id: str
    ) -> Sequence[int]:
        """Generate under continuous batching, which knows no stop strings: its request is cancelled at the first."""
        batching, loop = self.manager._cb, asyncio.get_running_loop()
        self.manager._check_alive(request_id)
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
            prompt,
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

    def take_counts(self, request_id: str) -> SpeculationCounts | None:
        """Return what a request that was answered drafted, once; None without drafts."""
        return self.manager.take_counts(request_id) if isinstance(self.manager, SpeculativeManager) else None

    async def score(self, sequences: list[list[int]], num_top: int) -> list[SequenceScores]:
        """Score the tokens of each sequence from the second on."""
        if not sequences:
            return []
        run = partial(
            score_sequences,
            self.loaded.scorer,
            sequences,
            num_top=num_top,
            max_forward_tokens=self.loaded.batching.max_forward_tokens,
        )
        return await asyncio.get_running_loop().run_in_executor(self._scoring, run)


def _ends(tokens: Sequence[int], config: Any) -> bool:
    """Tell whether the last token ends an answer by itself."""
    ends = config.eos_token_id
    return bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])
