"""The range fix on tiny VAEs: exact where it must be, and refused where it can't be held."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import NumericsError
from pipeline.numerics.range_fix import TARGET_ABSMAX, apply_range_fix, measure_activations, plan_range_fix
from pipeline.numerics.range_proof import RangeFixProof, prove_range_fix
from pipeline.numerics.residual_spaces import Part, trace_spaces
from pipeline.numerics.similarity import peak_signal_to_noise_db, structural_similarity
from tests.fakes.tiny_vae import build_vae, draw_latents, inflate_decoder

LAYOUTS = {
    "attention, shortcut, both quant convs": {},
    "no attention": {"mid_block_add_attention": False},
    "no shortcut": {"channels": (16, 16)},
    "no quant convs": {"use_quant_conv": False, "use_post_quant_conv": False},
    "three stages, two layers": {"channels": (16, 32, 48), "layers": 2},
    "one stage, nothing upsampled": {"channels": (16,)},
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def decode(vae: Any, latents: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(vae).to(dtype).decode(latents.to(dtype)).sample.float()


def drop_epsilon(vae: Any) -> Any:
    for module in vae.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = 0.0
    return vae


def fix_range(
    vae: Any, samples: torch.Tensor, *, part: Part = "decoder", target: float = TARGET_ABSMAX
) -> tuple[Any, RangeFixProof]:
    """Plan from the samples, apply to a copy, and prove on the same samples, as the step does."""
    plan = plan_range_fix(vae, measure_activations(vae, samples, part=part), part=part, target=target)
    fixed = copy.deepcopy(vae)
    apply_range_fix(fixed, plan)
    return fixed, prove_range_fix(vae, fixed, samples, plan=plan)


@by_layout
def test_an_inflated_vae_overflows_in_float16_and_is_repaired(layout: dict[str, Any]) -> None:
    latents, others = draw_latents(size=12), draw_latents(size=12, seed=2)
    original = build_vae(**layout)
    inflated = inflate_decoder(copy.deepcopy(original), 2.0**16, inner=2.0**14)
    expected = decode(inflated, others)
    assert not decode(inflated, others, torch.float16).isfinite().all()
    fixed, proof = fix_range(inflated, latents)
    assert proof.max_difference <= 1e-5
    assert min(proof.headroom_bits_before.values()) < 0 < 1 <= min(proof.headroom_bits_after.values())
    repaired = decode(fixed, others, torch.float16)
    # as good as float16 ever is on this model
    floor = peak_signal_to_noise_db(decode(original, others, torch.float16), decode(original, others), data_range=2)
    psnr = peak_signal_to_noise_db(repaired, expected, data_range=2)
    assert (psnr > floor - 3).all() and (psnr > 50).all(), (psnr, floor)
    assert (structural_similarity(repaired, expected, data_range=2) > 0.999).all()


@by_layout
def test_scaling_by_powers_of_two_is_exact_without_the_epsilon(layout: dict[str, Any]) -> None:
    """A wrong edge shows as a difference; so every space is scaled, however little it needs it."""
    vae = drop_epsilon(build_vae(**layout))
    latents = draw_latents()
    plan = plan_range_fix(vae, measure_activations(vae, latents), target=0.01)
    assert plan.scales and max(plan.scales.values()) < 1
    fixed = copy.deepcopy(vae)
    apply_range_fix(fixed, plan)
    assert decode(fixed, latents).equal(decode(vae, latents))


@by_layout
def test_the_encoder_is_fixed_by_the_same_rule(layout: dict[str, Any]) -> None:
    vae = build_vae(**layout)
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(3)) * 2 - 1
    fixed, proof = fix_range(vae, images, part="encoder", target=0.5)
    assert proof.max_difference < 1e-3 and proof.subnormal_fraction_after
    with torch.no_grad():
        before, after = (model.encode(images).latent_dist.mean for model in (vae, fixed))
    assert torch.allclose(before, after, atol=1e-3)
    assert decode(fixed, draw_latents()).equal(decode(vae, draw_latents()))


def test_each_space_comes_to_the_target_by_the_largest_power_of_two() -> None:
    vae = inflate_decoder(build_vae(), 2.0**16, inner=2.0**14)
    latents = draw_latents()
    plan = plan_range_fix(vae, measure_activations(vae, latents))
    fixed = copy.deepcopy(vae)
    apply_range_fix(fixed, plan)
    ranges = measure_activations(fixed, latents)
    for space, members in trace_spaces(vae, "decoder").members.items():
        absmax = max(ranges[name].absmax for name in members)
        assert math.frexp(plan.scales[space])[0] == 0.5
        assert absmax <= TARGET_ABSMAX
        assert plan.scales[space] == 1 or absmax > TARGET_ABSMAX / 2


def test_a_vae_within_range_is_left_alone() -> None:
    vae = build_vae()
    plan = plan_range_fix(vae, measure_activations(vae, draw_latents()))
    assert plan.rescales == () and set(plan.scales.values()) == {1.0}


def test_an_attention_without_its_residual_begins_a_stream() -> None:
    vae = build_vae()
    attention = vae.decoder.mid_block.attentions[0]
    attention.residual_connection, attention.rescale_output_factor = False, 2.0
    inflated = inflate_decoder(vae, 2.0**16)
    fixed, proof = fix_range(inflated, draw_latents())
    assert proof.max_difference <= 1e-5
    assert decode(fixed, draw_latents(), torch.float16).isfinite().all()


def test_blocks_with_attention_are_followed_in_their_order() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        down_block_types=("AttnDownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, 32),
        norm_num_groups=8,
    ).eval()
    fixed, proof = fix_range(inflate_decoder(vae, 2.0**18), draw_latents())
    assert proof.max_difference <= 1e-5 and min(proof.headroom_bits_after.values()) >= 1
    assert decode(fixed, draw_latents(), torch.float16).isfinite().all()


def test_too_small_a_target_is_another_model_and_names_the_norm() -> None:
    vae = build_vae()
    with pytest.raises(NumericsError, match=r"equal outputs within 0.001, got .* first at 'decoder\..*norm"):
        fix_range(vae, draw_latents(), target=1e-3)


def test_what_can_not_be_scaled_is_named() -> None:
    vae = drop_epsilon(build_vae())
    with torch.no_grad():
        vae.decoder.mid_block.resnets[0].norm2.weight.mul_(1e5)
    with pytest.raises(NumericsError, match=r"1 doublings of headroom.* at 'decoder.mid_block.resnets.0.norm2'"):
        fix_range(vae, draw_latents())


def test_a_stream_that_grows_too_far_within_one_space_is_another_model() -> None:
    """Its quiet beginning shares the scale of its loud end, and falls to the size of the epsilon."""
    vae = build_vae()
    with torch.no_grad():
        vae.decoder.mid_block.resnets[1].conv2.weight.mul_(1e6)
    with pytest.raises(NumericsError, match=r"first at 'decoder.mid_block.resnets.0.norm1'"):
        fix_range(vae, draw_latents())


def test_subnormal_weights_are_named() -> None:
    vae = drop_epsilon(build_vae())
    with torch.no_grad():  # one channel is large, so that all the layer's weights have to be scaled
        vae.decoder.conv_in.weight[0].mul_(2.0**24)
    latents = draw_latents()
    plan = plan_range_fix(vae, measure_activations(vae, latents))
    fixed = copy.deepcopy(vae)
    apply_range_fix(fixed, plan)
    with pytest.raises(NumericsError, match=r"25% of a layer's weights to be subnormal in torch.float16, got \d+% at"):
        prove_range_fix(vae, fixed, latents, plan=plan, tolerance=math.inf)


def test_a_plan_is_applied_once() -> None:
    vae = inflate_decoder(build_vae(), 2.0**16)
    plan = plan_range_fix(vae, measure_activations(vae, draw_latents()))
    apply_range_fix(vae, plan)
    with pytest.raises(NumericsError, match="applied already"):
        apply_range_fix(vae, plan)


def test_half_precision_is_refused() -> None:
    with pytest.raises(NumericsError, match=r"expected a VAE in torch.float32, found torch.float16"):
        measure_activations(build_vae().half(), draw_latents())


def test_an_overflow_in_float32_is_named() -> None:
    vae = inflate_decoder(build_vae(), 2.0**120)
    with torch.no_grad():
        vae.decoder.conv_in.weight.mul_(1e4)
    with pytest.raises(NumericsError, match="NaN or infinity at 'decoder.conv_in'"):
        plan_range_fix(vae, measure_activations(vae, draw_latents()))


def test_another_layout_is_refused() -> None:
    vae = build_vae()
    vae.decoder.up_blocks[0].resnets[0].norm1 = nn.LayerNorm(8)
    with pytest.raises(NumericsError, match=r"a GroupNorm at 'decoder.up_blocks.0.resnets.0.norm1'"):
        trace_spaces(vae, "decoder")
    with pytest.raises(NumericsError, match="another layout"):
        trace_spaces(nn.Linear(2, 2), "decoder")
