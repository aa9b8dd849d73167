"""Serial generation with drafted tokens, and the count of those that were kept.

No count relies on the settings. A hook keeps the tokens that each forward pass of the target was
fed, and the counts follow from them and the answer. When they do not explain the answer
token by token, it is an error. A streamed answer is counted like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipeline.errors import EngineError
from pipeline.products.text.serving.loading import LoadedModel
from pipeline.products.text.serving.streams import PieceStreamer, SerialManager
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig


class SpeculativeManager(SerialManager):
    """The library's serial generation, one request at a time, with a draft model or prompt lookup."""

    def __init__(self, loaded: LoadedModel, config: SpeculativeConfig) -> None:
        super().__init__(loaded)
        self._config = config
        self._fed: list[list[int]] = []
        self._counts: dict[str, SpeculationCounts] = {}
        loaded.model.register_forward_pre_hook(self._note_forward, with_kwargs=True)

    def take_counts(self, request_id: str) -> SpeculationCounts | None:
        """Return the counts of a request that was answered, once; None of one that a stop string ended."""
        return self._counts.pop(request_id, None)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> tuple[str, int, torch.Tensor]:
        """Generate on the library's inference thread; arguments and result as in the base class."""
        tokens, self._counts[request_id] = await self.async_submit(self.generate, inputs, gen_config)
        return processor.decode(tokens, skip_special_tokens=True), inputs["input_ids"].shape[-1], tokens

    def _run_stream(self, inputs: dict[str, Any], config: Any, streamer: PieceStreamer, request_id: str) -> None:
        _, counts = self.generate(inputs, config, streamer)
        if not streamer.is_cancelled:  # nobody would take them
            self._counts[request_id] = counts

    def generate(
        self, inputs: dict[str, Any], config: Any, streamer: PieceStreamer | None = None
    ) -> tuple[torch.Tensor, SpeculationCounts]:
        """Generate the answer to one prompt.

        Args:
            inputs: `input_ids` and `attention_mask`, int64 [1, n]; `stopping_criteria` too where there are any, each a
                `StopStrings`.
            config: the generation config, with `max_new_tokens`.
            streamer: is given the tokens of each target forward pass.

        Returns:
            The completion's token ids, int64 [m], and the counts. It ends where it does without drafts: what a pass
            accepted behind a stop string is cut off.
        """
        self._fed.clear()
        loaded, num_prompt = self._loaded, inputs["input_ids"].shape[-1]
        sequence = loaded.model.generate(
            **inputs, generation_config=config, assistant_model=loaded.draft, streamer=streamer
        )[0]
        for stops in inputs.get("stopping_criteria", ()):
            sequence = sequence[: num_prompt + stops.count_kept(sequence[num_prompt:].tolist())]
        return sequence[num_prompt:], count_speculation(self._fed, sequence.tolist(), num_prompt, self._config)

    def _note_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._fed.append(kwargs["input_ids"][0].tolist())


def count_speculation(
    fed: Sequence[Sequence[int]], sequence: Sequence[int], num_prompt: int, config: SpeculativeConfig
) -> SpeculationCounts:
    """Count the tokens that were drafted and kept in one greedy generation.

    Args:
        fed: token ids that each forward pass of the target was fed. The first begins with the prompt, each later
            one with the last certain token; the drafted tokens follow.
        sequence: prompt and completion. A stop string may have ended it within what the last pass accepted; what was
            drafted behind it does not count, as nothing is drafted behind any other end.
        num_prompt: tokens of the prompt.
        config: method and drafted tokens per forward pass.

    Raises:
        EngineError: the forward passes do not add up to the completion.
    """
    num_known, num_drafted, accepted = num_prompt, 0, [0] * config.num_tokens
    for number, tokens in enumerate(fed):
        drafted = tokens[1 if number else num_prompt :]
        wanted = sequence[num_known:]
        kept = _common_length(drafted, wanted)
        if kept == len(wanted):
            drafted = drafted[:kept]
        for position in range(kept):
            accepted[position] += 1
        num_drafted += len(drafted)
        num_known += kept + 1
    # the last pass gives no token of its own when an accepted one ends the answer
    if num_known - len(sequence) not in (0, 1):
        raise EngineError(
            f"speculation: {len(fed)} forward passes with {sum(accepted)} accepted tokens don't make the "
            f"{len(sequence) - num_prompt} tokens of the answer"
        )
    return SpeculationCounts(
        method=config.method,
        num_tokens=config.num_tokens,
        num_target_forwards=len(fed),
        num_completion_tokens=len(sequence) - num_prompt,
        num_drafted=num_drafted,
        accepted_by_position=tuple(accepted),
    )


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
