"""Is what params.yaml asks for what a bundle's release was made by, and what stands beside it what it was judged on?

DVC answers that from dvc.lock, which a merge or a hand can make say anything. The bundle keeps the settings of its
release and the digests of weights and cases, and its verdict follows from its scores, so both are compared with it.
Settings are compared as `load_params` reads them: comments, order and defaults that are written out change nothing.
Candidates that are neither released nor the reference may be others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.gate.loosening import MANIFEST
from pipeline.records.digests import digest_file, digest_files, digest_json, name_changed_file
from pipeline.records.record_files import read_record
from pipeline.release.manifest import PARAMS, Manifest
from pipeline.release.settings import load_released
from pipeline.release.verification import find_differences, show_kept
from pipeline.settings.base import Product

_REMEDY = "run `make repro` where the weights are, and commit what it writes"


def find_other_recipe(bundle: Path, product: Product) -> list[str]:
    """Return the settings of a product that are not those of its last release, one line each.

    Args:
        bundle: of the product.
        product: what params.yaml asks for now.

    Raises:
        SettingsError: the bundle's settings can't be read.
    """
    named = read_record(bundle / MANIFEST, Manifest).product  # that release may be of another name
    released = load_released(bundle / PARAMS, named)
    return [
        f"params.yaml: {product.locate(key)}: {bundle / PARAMS} has {show_kept(was)}, got {show_kept(now)}; {_REMEDY}"
        for key, was, now in find_differences(_describe(released), _describe(product))
    ]


def _describe(product: Product) -> dict[str, Any]:
    """Return what a release is made by and judged on, with all defaults."""
    settings = product.model_dump(mode="json")
    names = {product.reference, *product.release}
    return settings | {"candidates": {name: made for name, made in settings["candidates"].items() if name in names}}


def find_other_material(manifest: Manifest, root: Path, *, cases: Mapping[str, str], adapter: Path | None) -> list[str]:
    """Return the weights, cases and code of the user's that are not those of a release, as far as they are here.

    Args:
        manifest: of the release.
        root: of the project.
        cases: digest of each evalset that is here, by eval.
        adapter: the file that a network is run with; None: there is none.
    """
    problems = [
        f"evals.{name}: its cases are not those of the release ({kept.digest[:12]}, got {cases[name][:12]})"
        for name, kept in manifest.evalsets.items()
        if cases.get(name, kept.digest) != kept.digest
    ]
    sides = {side.weights_path: side for side in (manifest.reference, *manifest.release)}
    for path, side in sides.items():
        if (root / path).is_dir() and digest_json(found := digest_files(root / path)) != side.weights_digest:
            problems.append(
                f"{path}: not the weights of {side.candidate} that the release is about "
                f"({name_changed_file(side.weights, found)})"
            )
    pinned = manifest.reference.adapter_digest
    if adapter is not None and pinned is not None and digest_file(root / adapter) != pinned:
        problems.append(f"{adapter}: not the adapter of the release ({pinned[:12]})")
    return [f"{problem}; {_REMEDY}" for problem in problems]
