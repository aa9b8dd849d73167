"""Choose the token sequences a quantiser sees, from an evalset of kind "documents".

No quantisation library takes sample weights, so a text that should count more is repeated. Samples
are returned one by one and never packed or padded. A batch would be cut to its shortest sample,
which undoes any weighting toward long texts.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from pipeline.errors import EvalsetError, QuantizationError
from pipeline.evalsets.cards import Evalset
from pipeline.products.text.step_settings import Calibration

MIN_TOKENS = 512  # below this even the narrowest layers get a rank-deficient Hessian


def select_samples(
    evalset: Evalset, tokenizer: Any, settings: Calibration, *, vocab_size: int | None = None
) -> list[list[int]]:
    """Draw `num_samples` token sequences with probability proportional to a power of their length.

    The draw is systematic (Madow 1949). With weights w and n samples, text i has an expected count
    n * w_i / sum(w), and is drawn the integer below or above it. So no text is repeated unless its
    weight asks for more than one copy, and the weighting holds exactly, not only on average.
    Lengths are counted after the cut to `max_tokens`, because that is what the quantiser sees.

    Args:
        evalset: of kind "documents"; the buckets of its cases name their source.
        tokenizer: the checkpoint's own.
        settings: sources, number, cut, length exponent and seed.
        vocab_size: rows of the embedding; None leaves token ids unchecked.

    Returns:
        Token ids of each sample, in the order drawn.

    Raises:
        EvalsetError: the set is of another kind.
        QuantizationError: a source without cases, too few tokens, or ids outside the vocabulary.
    """
    pool = [ids for text in _texts(evalset, settings) if (ids := encode(text, tokenizer)[: settings.max_tokens])]
    if not pool:
        raise QuantizationError(f"calibration.sources: {settings.sources!r} give no tokens")
    samples = _draw(pool, [len(ids) ** settings.length_exponent for ids in pool], settings)
    if (num_tokens := sum(map(len, samples))) < MIN_TOKENS:
        raise QuantizationError(
            f"calibration: expected at least {MIN_TOKENS} tokens, got {num_tokens} in {len(samples)} samples; "
            "raise num_samples or max_tokens"
        )
    _check_vocabulary(samples, vocab_size)
    return samples


def encode(text: str, tokenizer: Any) -> list[int]:
    """Tokenise as the endpoint would, without adding special tokens a second time.

    A text that already holds special tokens was rendered by a chat template, which puts them
    where they belong. Any other text gets the tokens that the tokenizer adds by itself.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    if special.isdisjoint(ids):
        ids = tokenizer(text, add_special_tokens=True)["input_ids"]
    return ids


def count_samples(samples: Sequence[Sequence[int]]) -> dict[str, int]:
    """Summarise samples for the step's record: how many, how many distinct, and token lengths."""
    lengths = sorted(map(len, samples))
    return {
        "num_samples": len(samples),
        "num_distinct": len({tuple(ids) for ids in samples}),
        "num_tokens": sum(lengths),
        "min_tokens": lengths[0],
        "median_tokens": round(statistics.median(lengths)),
        "p90_tokens": lengths[min(len(lengths) - 1, int(0.9 * len(lengths)))],
        "max_tokens": lengths[-1],
    }


def _texts(evalset: Evalset, settings: Calibration) -> list[str]:
    card = evalset.card
    if card.kind != "documents":
        raise EvalsetError(f"calibration set {card.name!r}: expected kind 'documents', got {card.kind!r}")
    for source in settings.sources:
        if not any(source in case.buckets for case in evalset.cases):
            known = ", ".join(sorted(card.buckets)) or "none"
            raise QuantizationError(
                f"calibration.sources: no case of {card.name!r} is in bucket {source!r}; it has {known}"
            )
    wanted = set(settings.sources)
    return [case.text for case in evalset.cases if not wanted.isdisjoint(case.buckets)]


def _draw(pool: list[list[int]], weights: list[float], settings: Calibration) -> list[list[int]]:
    generator = random.Random(settings.seed)
    # neighbours exclude each other in a systematic draw: a random order keeps that free of pattern
    order = list(range(len(pool)))
    generator.shuffle(order)
    bounds = list(accumulate(weights[i] for i in order))
    stride = bounds[-1] / settings.num_samples
    point, drawn, position = generator.random() * stride, [], 0
    for _ in range(settings.num_samples):
        while position < len(bounds) - 1 and bounds[position] <= point:
            position += 1
        drawn.append(pool[order[position]])
        point += stride
    return drawn


def _check_vocabulary(samples: list[list[int]], vocab_size: int | None) -> None:
    largest = max(max(ids) for ids in samples)
    if vocab_size is not None and largest >= vocab_size:
        raise QuantizationError(
            f"calibration: token id {largest} is outside the embedding of {vocab_size} rows; "
            "the tokenizer belongs to another checkpoint"
        )
