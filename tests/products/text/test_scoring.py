"""Scores in slices and in forwards of any size are those of plain transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.products.text.model_loading import load_model
from pipeline.products.text.serving import scoring
from pipeline.products.text.serving.scoring import SequenceScores, score_sequences
from tests.fakes.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("scoring") / "tiny"), dtype="float32")


def make_sequences() -> list[list[int]]:
    """Three choices of one question, which share a row, and documents of other lengths."""
    generator = np.random.default_rng(0)
    question, *rest = ([int(i) for i in generator.integers(9, 60, n)] for n in (30, 4, 9, 6, 70, 12, 33))
    return [*(question + choice for choice in rest[:3]), *rest[3:]]


def check_equal(scores: list[SequenceScores], others: list[SequenceScores], tolerance: float) -> None:
    for one, other in zip(scores, others, strict=True):
        for name in ("token_logprobs", "top_logprobs"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=tolerance, rtol=0)
        np.testing.assert_array_equal(one.top_ids, other.top_ids)


def test_slices_of_logits_change_no_bit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score_sequences(model, make_sequences(), num_top=3)
    monkeypatch.setattr(scoring, "SLICE_LOGITS", 7 * model.config.vocab_size)
    check_equal(score_sequences(model, make_sequences(), num_top=3), whole, tolerance=0)


@pytest.mark.parametrize("max_forward_tokens", [1, 64, 16_384])
def test_forwards_of_any_size_give_the_scores_of_plain_transformers(model: Any, max_forward_tokens: int) -> None:
    sequences = make_sequences()
    scores = score_sequences(model, sequences, num_top=2, max_forward_tokens=max_forward_tokens)
    for ids, score in zip(sequences, scores, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        top = logprobs.topk(2)
        expected = SequenceScores(
            logprobs[range(len(ids) - 1), ids[1:]].numpy(), top.indices.int().numpy(), top.values.numpy()
        )
        check_equal([score], [expected], tolerance=1e-5)
