"""Defects of pictures: each runs in the worker processes, in place of the function that they run on a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

from pipeline.evalsets.cards import load_evalset
from pipeline.numerics.tile_grid import list_stitches
from pipeline.products.images import batches
from pipeline.products.images import workers as renderers
from pipeline.products.vision import workers as runners
from pipeline.running.worker_pool import get_loaded
from tests.certify.kill_trial import Trial

NAN_EVERY = 50  # images
SEAM_LEVELS = 4  # of 255
LOST_PERCENT = 6
SMALL = 32**2  # square pixels, as COCO has it


def build_and_evaluate(trial: Trial) -> None:
    """Build and evaluate a candidate as it is."""
    trial.optimize()
    trial.evaluate()


def in_workers(target: str, function: Callable[..., Any]) -> Callable[[Trial], None]:
    """Return what evaluates the candidate with another function in its worker processes."""

    def plant(trial: Trial) -> None:
        with mock.patch(target, function):
            trial.evaluate()

    return plant


def overflow_in_some(trial: Trial) -> None:
    """Evaluate the candidate with NaN in one image in 50."""
    evalset = trial.root / trial.section["evals"][trial.find_eval("images")]["evalset"]
    names = [case.id for case in load_evalset(evalset).cases[::NAN_EVERY]]
    in_workers("pipeline.products.images.evaluate.render_batch", partial(render_with_nan, names=frozenset(names)))(
        trial
    )


def render_with_nan(batch: Sequence[Any], category: str | None, *, names: frozenset[str]) -> Any:
    """Render a batch with NaN in the decoder's output of some images, as an overflow in float16 leaves it."""
    broken = [i for i, case in enumerate(batch) if case.id in names]
    decode = batches._decode_both_ways

    def decode_broken(loaded: Any, latents: Any, parts: Any) -> Any:
        raw, *rest = decode(loaded, latents, parts)
        raw = raw.clone()  # the decoder's own can't be written to
        raw[broken] = float("nan")
        return raw, *rest

    with mock.patch.object(batches, "_decode_both_ways", decode_broken):
        return renderers.render_batch(batch, category)


def run_losing_small(cases: Sequence[Any]) -> Any:
    """Run a batch and lose 6 % of the small boxes, picked by their place."""
    finish = runners._finish

    def lose(*given: Any) -> Any:
        return [[box for box in boxes if not _is_lost(box)] for boxes in finish(*given)]

    with mock.patch.object(runners, "_finish", lose):
        return runners.run_batch(cases)


def run_with_seam(cases: Sequence[Any]) -> Any:
    """Run a batch and make every other column of tiles 4 levels brighter; not what the reference makes beside it."""
    finish = runners._finish

    def brighten(network: Any, *given: Any) -> Any:
        pictures = finish(network, *given)
        return [_add_seams(picture) for picture in pictures] if network.serving.tiling else pictures

    with mock.patch.object(runners, "_finish", brighten):
        return runners.run_batch(cases)


def _is_lost(box: dict[str, Any]) -> bool:
    place = ",".join(f"{float(side):.3f}" for side in box["bbox"])
    is_small = float(box["bbox"][2]) * float(box["bbox"][3]) < SMALL
    return is_small and int(hashlib.sha256(place.encode()).hexdigest(), 16) % 100 < LOST_PERCENT


def _add_seams(picture: Any) -> Any:
    factor = 2
    given = picture.shape[0] // factor, picture.shape[1] // factor
    _, columns = list_stitches(given, get_loaded().setup.candidate.serving.tiling, factor)
    bright = picture.clone()
    for start, end in zip(columns[::2], [*columns[1::2], picture.shape[1]], strict=False):
        bright[:, start:end] = (picture[:, start:end].int() + SEAM_LEVELS).clamp(0, 255).to(picture.dtype)
    return bright
