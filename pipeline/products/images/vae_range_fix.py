"""The step that rescales a decoder so that float16 holds it, on latents of the candidate's own prompts.

The range is measured on half of the latents and proved on the other half: a proof on what the plan was made from
would prove little. The prompts come from all over the eval, at the product's own guidance.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import SettingsError
from pipeline.evalsets.cases import spread
from pipeline.numerics.range_fix import apply_range_fix, measure_activations, plan_range_fix
from pipeline.numerics.range_proof import RangeFixProof, prove_range_fix
from pipeline.products.images.folders import find_weights, read_part
from pipeline.products.images.rendering import Prompt, load_pipeline, make_latents, unscale_latents
from pipeline.products.images.results import StepResult
from pipeline.products.images.settings import VaeRangeFixStep
from pipeline.records.serving import PipelineServing

_FEWEST = 4  # prompts


def run_vae_range_fix(
    folder: Path, serving: PipelineServing, *, step: VaeRangeFixStep, prompts: list[Prompt]
) -> StepResult:
    """Rewrite the VAE of a pipeline folder; the record holds the proof.

    Args:
        folder: the candidate's own copy.
        serving: so far.
        step: target, headroom and tolerated difference.
        prompts: of the eval; up to `step.num_prompts` from all over them are rendered.

    Raises:
        NumericsError: equality, headroom or the share of subnormals can't be held; names the module.
        SettingsError: there are too few prompts.
    """
    if len(prompts) < _FEWEST:
        raise SettingsError(
            f"vae_range_fix: expected {_FEWEST} prompts or more in the first eval, half of them to "
            f"measure and half to prove, got {len(prompts)}; add some"
        )
    plain = serving.model_copy(update={"unet_dtype": "float32", "vae_dtype": "float32", "tiling": None})
    pipe = load_pipeline(folder, plain)
    latents = _collect_latents(pipe, spread(prompts, step.num_prompts), plain)
    seen, unseen = latents[::2], latents[1::2]
    ranges = measure_activations(pipe.vae, seen)
    plan = plan_range_fix(pipe.vae, ranges, target=step.target_absmax)
    fixed = copy.deepcopy(pipe.vae)
    apply_range_fix(fixed, plan)
    proof = prove_range_fix(
        pipe.vae, fixed, unseen, plan=plan, tolerance=step.max_difference, min_headroom_bits=step.min_headroom
    )
    _replace_vae(fixed, folder / "vae")
    record = {"proof": build_proof_record(proof, num_prompts=len(unseen)), "scales": dict(plan.scales)}
    return StepResult(serving, record)


def _replace_vae(vae: Any, part: Path) -> None:
    """Save a VAE in the place of another, whose shards would be read before it."""
    for name in {find_weights(part).name, *(info.file for info in read_part(part).values())}:
        (part / name).unlink()
    vae.register_to_config(force_upcast=False)  # diffusers casts a float16 VAE back to float32 where this is true
    vae.save_pretrained(part, safe_serialization=True)


def build_proof_record(proof: RangeFixProof, *, num_prompts: int) -> dict[str, Any]:
    """Return a proof as JSON: what was measured on latents that the plan had not seen."""
    worst = min(proof.headroom_bits_before, key=lambda name: proof.headroom_bits_before[name])
    return {
        "num_prompts": num_prompts,
        "max_difference": proof.max_difference,
        "worst_module": worst,
        "headroom_bits_before": _round(proof.headroom_bits_before),
        "headroom_bits_after": _round(proof.headroom_bits_after),
        "subnormal_fraction_after": _round(proof.subnormal_fraction_after),
    }


def _round(numbers: Any) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}


@torch.inference_mode()
def _collect_latents(pipe: Any, prompts: list[Prompt], serving: PipelineServing) -> torch.Tensor:
    size = serving.batch_size
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    made = [make_latents(pipe, batch, serving).values for batch in batches]
    return unscale_latents(pipe.vae, torch.cat(made))
