"""Checks of evalsets against the settings that name them, for products of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.errors import EvalsetError, SettingsError
from pipeline.evalsets.cards import Evalset
from pipeline.evalsets.cases import CASES_FILE, Case, check_distinct
from pipeline.settings.base import Product

Load = Callable[[Path], Evalset]
_NUM_SHOWN = 5  # lines that are named in an error


def check_buckets(
    product: Product, evalsets: Mapping[str, Evalset | None], objects: Mapping[str, list[str]] | None = None
) -> None:
    """Refuse a tolerance of a bucket that its evalset has not.

    Args:
        product: whose tolerances.
        evalsets: by eval; None stands for one whose cases are elsewhere.
        objects: by metric, buckets of objects that params.yaml adds.

    Raises:
        SettingsError: with the path of the key.
    """
    for metric, tolerance in product.gate.tolerances.items():
        eval_name = metric.split("/")[0]
        evalset, added = evalsets[eval_name], (objects or {}).get(metric, [])
        for bucket in tolerance.buckets:
            if evalset is not None and bucket not in (known := [*evalset.card.buckets, *added]):
                raise SettingsError(
                    f"{product.locate('gate')}.tolerances.{metric}.buckets.{bucket}: evalset {evalset.card.name!r} has "
                    f"no such bucket; it has {', '.join(known) or 'none'}"
                )


def check_seams_are_gated(product: Product) -> None:
    """Refuse a product without a tolerance of seams in some eval; for one of which a candidate works in tiles.

    Raises:
        SettingsError: with the path of the key.
    """
    for name in product.evals:
        tolerance = product.gate.tolerances.get(f"{name}/seam_step_levels")
        if tolerance is None or tolerance.overall is None or tolerance.tier == "advisory":
            raise SettingsError(
                f"{product.locate('gate')}.tolerances.{name}/seam_step_levels: expected an overall tolerance "
                "that can stop a release, as a candidate runs in tiles, found none: a seam must not "
                "pass for want of one"
            )


def load_kind(load: Load, folder: Path, where: str, kind: str) -> Evalset:
    """Load an evalset that a key names; refuse a folder without one, and one of another kind."""
    if not (folder / CASES_FILE).is_file():
        raise SettingsError(f"{where}: expected an evalset folder with card.yaml and {CASES_FILE}, got {str(folder)!r}")
    evalset = load(folder)
    card = evalset.card
    if card.kind != kind:
        raise SettingsError(f"{where}: expected an evalset of kind {kind!r}, {card.name!r} is of kind {card.kind!r}")
    return evalset


def check_each_once(path: Path, cases: Sequence[Case]) -> None:
    """Refuse cases that ask the same as others, as `check_distinct` does, and name all."""
    try:
        check_distinct(path, cases)
    except EvalsetError as error:
        raise EvalsetError(f"{error}{name_others(case.digest for case in cases)}") from None


def name_others(digests: Iterable[str]) -> str:
    """Return the end of a message on the first line that repeats a digest: which others do."""
    lines: dict[str, list[int]] = {}
    for number, digest in enumerate(digests, start=1):
        lines.setdefault(digest, []).append(number)
    others = sorted(number for same in lines.values() for number in same[1:])[1:]
    shown = ", ".join(map(str, others[:_NUM_SHOWN])) + ", ..." * (len(others) > _NUM_SHOWN)
    return f"; likewise {len(others):,} more (lines {shown})" if others else ""
