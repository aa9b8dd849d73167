"""The settings of a guidance sweep, as an image product of their own: one candidate a setting.

A setting is an ordinary `guidance` step, so what the sweep recommends can be copied into params.yaml. Everything else,
the reference's checkpoint and guidance, the sampling, the evals and the tolerances, is the product's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from pydantic import ValidationError

from pipeline.errors import SettingsError, describe_problem
from pipeline.products.images.metrics import LIKENESS
from pipeline.products.images.settings import Guidance, GuidanceStep, ImageCandidateSettings, ImagesEval, ImagesProduct

SATURATION, SIMILARITY = "saturated_pixel_fraction", "clip_similarity"  # metrics that a sweep is about


def list_settings(
    scales: Sequence[float], rescales: Sequence[float], percentiles: Sequence[float | None], max_values: Sequence[float]
) -> list[GuidanceStep]:
    """Return every combination, once each; without a percentile there is nothing that a maximum could limit.

    Raises:
        SettingsError: a number out of its range.
    """
    steps: dict[str, GuidanceStep] = {}
    for percentile, max_value, scale, rescale in product(percentiles, max_values, scales, rescales):
        asked = {"kind": "guidance", "scale": scale, "rescale": rescale}
        if percentile is not None:
            asked |= {"dynamic_threshold_percentile": percentile, "sample_max_value": max_value}
        try:
            step = GuidanceStep.model_validate(asked)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise SettingsError(f"{'.'.join(map(str, problem['loc']))}: {describe_problem(problem)}") from None
        steps[name_setting(step)] = step
    return list(steps.values())


def name_setting(step: GuidanceStep) -> str:
    """Return a candidate's name for a setting: "scale-12-rescale-0-7"."""
    parts = [("scale", step.scale), ("rescale", step.rescale)]
    if step.dynamic_threshold_percentile is not None:
        parts += [("percentile", step.dynamic_threshold_percentile), ("max", step.sample_max_value)]
    return "-".join(f"{key}-{value:g}" for key, value in parts).replace(".", "-").replace("+", "")


def make_sweep_product(
    product: ImagesProduct, settings: Iterable[GuidanceStep], *, eval_name: str, evalset: str
) -> ImagesProduct:
    """Return the product that a sweep renders and judges: the reference, and each setting that is not its own.

    Likeness to the reference's pictures is not asked: another guidance draws others on purpose. Every setting is judged
    as if it were released alone: a release of all of them is nobody's decision.

    Args:
        product: settings.
        settings: guidance steps.
        eval_name: the eval whose prompts are rendered.
        evalset: folder of these prompts, or of some of them.

    Raises:
        SettingsError: no tolerance is set for the eval, or there is nothing to compare with the reference.
    """
    checkpoint, guidance = product.candidates[product.reference].checkpoint, read_setting(product, product.reference)
    steps = {name_setting(step): [step] for step in settings if step != guidance}
    if not steps:
        raise SettingsError("sweep: expected a setting beside the reference's own guidance, found none; name more")
    left_out = f"{eval_name}/{LIKENESS.name}"
    tolerances = {m: t for m, t in product.gate.tolerances.items() if m.startswith(f"{eval_name}/") and m != left_out}
    if not tolerances:
        raise SettingsError(
            f"{product.locate('gate')}.tolerances: expected one for eval {eval_name!r}, found none; add one"
        )
    candidates = {product.reference: product.candidates[product.reference]} | {
        name: ImageCandidateSettings(checkpoint=checkpoint, steps=list(step)) for name, step in steps.items()
    }
    evaluated = ImagesEval(**product.evals[eval_name].model_dump() | {"evalset": evalset})
    return ImagesProduct(
        name=product.name,
        kind="images",
        reference=product.reference,
        release=[next(iter(steps))],
        candidates=candidates,
        serving=product.serving,
        resources=product.resources,
        evals={eval_name: evaluated},
        gate=product.gate.model_copy(update={"tolerances": tolerances, "tripwires": {}}),
    )


def read_setting(product: ImagesProduct, name: str) -> GuidanceStep:
    """Return the guidance of a sweep's candidate; of one without steps it is the product's own."""
    steps = product.candidates[name].steps
    if not steps:
        guidance: Guidance = product.serving.guidance
        return GuidanceStep(kind="guidance", scale=guidance.scale, rescale=guidance.rescale)
    assert isinstance(steps[0], GuidanceStep)
    return steps[0]
