"""Guidance and its remedies against closed forms, and against what diffusers' pipelines run."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import NumericsError
from pipeline.numerics.guidance import guide, rescale_guidance, threshold_dynamically
from pipeline.numerics.saturation import guided_std_ratio


def draw(seed: int, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_guidance_of_one_and_zero_are_the_two_predictions() -> None:
    unconditional, conditional = draw(0), draw(1)
    assert torch.allclose(guide(unconditional, conditional, scale=1), conditional, atol=1e-6)
    assert guide(unconditional, conditional, scale=0).equal(unconditional)


def test_guidance_extrapolates() -> None:
    unconditional, conditional = torch.zeros(1, 2), torch.tensor([[1.0, -2.0]])
    assert guide(unconditional, conditional, scale=7.5).tolist() == [[7.5, -15.0]]


def test_full_rescale_gives_the_conditional_deviation_and_none_changes_nothing() -> None:
    guided, conditional = draw(0, spread=2.5), draw(1)
    assert rescale_guidance(guided, conditional, rescale=0) is guided
    full = rescale_guidance(guided, conditional, rescale=1)
    assert guided_std_ratio(full, conditional).tolist() == pytest.approx([1, 1, 1], abs=1e-6)
    half = rescale_guidance(guided, conditional, rescale=0.5)
    assert torch.allclose(half, (full + guided) / 2, atol=1e-6)


@pytest.mark.parametrize("rescale", [0.0, 0.3, 0.7, 1.0])
def test_rescale_is_that_of_diffusers(rescale: float) -> None:
    pipelines = pytest.importorskip("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion")
    guided, conditional = draw(0, spread=1.4), draw(1)
    expected = pipelines.rescale_noise_cfg(guided, conditional, guidance_rescale=rescale)
    assert torch.allclose(rescale_guidance(guided, conditional, rescale=rescale), expected, atol=1e-6)


@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "DPMSolverMultistepScheduler"])
@pytest.mark.parametrize(("percentile", "max_value"), [(0.995, 1.0), (0.995, 4.0), (0.9, 1.5), (1.0, 100.0)])
def test_dynamic_threshold_is_that_of_diffusers(scheduler: str, percentile: float, max_value: float) -> None:
    diffusers = pytest.importorskip("diffusers")
    built = getattr(diffusers, scheduler)(
        thresholding=True, dynamic_thresholding_ratio=percentile, sample_max_value=max_value
    )
    predicted = draw(0) * torch.tensor([0.2, 1.0, 3.0]).view(-1, 1, 1, 1)
    ours = threshold_dynamically(predicted, percentile=percentile, max_value=max_value)
    assert torch.allclose(ours, built._threshold_sample(predicted), atol=1e-6)


def test_a_quiet_sample_is_left_alone_and_a_loud_one_scaled_into_range() -> None:
    predicted = torch.tensor([[0.5, -0.9, 0.1, 0.0, 0.3], [0.0, 1.0, 2.0, -4.0, 3.0]])
    result = threshold_dynamically(predicted, percentile=0.75)
    assert result[0].equal(predicted[0])
    assert result[1].tolist() == pytest.approx([0, 1 / 3, 2 / 3, -1, 1])


def test_a_limit_of_one_is_a_plain_clamp() -> None:
    predicted = draw(0, spread=3)
    assert threshold_dynamically(predicted, max_value=1).equal(predicted.clamp(-1, 1))


def test_the_full_percentile_clips_nothing() -> None:
    predicted = draw(0, spread=3)
    largest = predicted.abs().amax(dim=(1, 2, 3), keepdim=True)
    assert torch.allclose(threshold_dynamically(predicted, percentile=1), predicted / largest)


def test_the_dtype_is_kept() -> None:
    assert threshold_dynamically(draw(0, spread=3).half()).dtype == torch.float16


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(NumericsError, match="from 0 to 1, got 1.2"):
        rescale_guidance(draw(0), draw(1), rescale=1.2)
    with pytest.raises(NumericsError, match="percentile"):
        threshold_dynamically(draw(0), percentile=99.5)
    with pytest.raises(NumericsError, match="one shape"):
        guide(draw(0), draw(1)[:1], scale=5)
    with pytest.raises(NumericsError, match="constant sample"):
        rescale_guidance(torch.ones(1, 4), torch.rand(1, 4), rescale=0.5)
