"""Check products of vision against the files they name, before any work; free of torch."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, EvalsetError, SettingsError
from pipeline.evalsets.cards import CARD_FILE, Evalset, check_categories, load_evalset
from pipeline.evalsets.cases import CASES_FILE
from pipeline.evalsets.checks import check_buckets, check_each_once, check_seams_are_gated, load_kind
from pipeline.evalsets.pictures import check_pictures, measure_picture
from pipeline.gate.categories import MIN_CATEGORY_CLUSTERS
from pipeline.products.vision.adapters import list_functions
from pipeline.products.vision.detection_settings import (
    AT_ONE_IOU,
    DetectionEval,
    name_categories,
)
from pipeline.products.vision.files import read_config
from pipeline.products.vision.onnx_files import (
    ENGINE,
    HIDE_GPU,
    find_onnx,
    inspect_onnx,
    is_onnx,
    read_version,
    refuse_steps,
)
from pipeline.products.vision.same_pictures import check_apart, check_distinct
from pipeline.products.vision.settings import PrecisionStep, QuantizeStep, TilingStep, UpscalingEval, VisionProduct
from pipeline.records.digests import digest_file, digest_folder
from pipeline.running.environment import Machine
from pipeline.running.kept_digests import digest_watched
from pipeline.running.weight_files import read_tensors
from pipeline.settings.metrics import AREAS

_NOTES = frozenset({"README.md"})
_INT8_SETS = ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")  # of which oneDNN's INT8 convolutions make use


def check_network(product: VisionProduct, root: Path) -> list[str]:
    """Refuse settings that the named files contradict; return a warning for each eval of categories in few clusters.

    Raises:
        SettingsError: with the path of the key, what it names, and what there is.
        EvalsetError: with file and line.
    """
    folders = [root / candidate.checkpoint for candidate in product.candidates.values()]
    _check_adapter(product, root, list_functions(*folders))
    evalsets = {
        name: load_kind(load_evalset, root / e.evalset, product.locate(f"evals.{name}.evalset"), e.kind)
        for name, e in product.evals.items()
    }
    for name, evalset in evalsets.items():
        _check_evalset(product.locate(f"evals.{name}"), product.evals[name], evalset, root)
    objects = {
        f"{name}/{metric.name}": [*e.areas, *e.categories]
        for name, e in product.evals.items()
        if isinstance(e, DetectionEval)
        for metric in e.metrics
        if metric.estimator == "average_precision" and metric.area == "all"
    }
    check_buckets(product, evalsets, objects)
    _check_sizes(product, evalsets)
    if product.calibration_images is not None:
        where, folder = product.locate("calibration_images"), root / product.calibration_images
        calibration = load_kind(load_evalset, folder, where, next(iter(product.evals.values())).kind)
        check_pictures(folder, calibration.cases)
        judged = {root / product.evals[name].evalset: evalset for name, evalset in evalsets.items()}
        check_apart(where, folder, calibration, judged, root)
        _check_enough(product, len(calibration.cases))
    for name, candidate in product.candidates.items():
        _check_folder(f"candidates.{name}.checkpoint", root / candidate.checkpoint, product.serving.batch_size)
        if is_onnx(root / candidate.checkpoint):
            refuse_steps(name, candidate.steps)
        for i, step in enumerate(candidate.steps):
            if isinstance(step, TilingStep):
                check_seams_are_gated(product)
                _check_tiling(f"candidates.{name}.steps.{i}.tile", step, evalsets, product, root)
    return [
        warning
        for name, e in product.evals.items()
        if isinstance(e, DetectionEval)
        for warning in _find_unnamed(product.locate(f"evals.{name}"), e, evalsets[name])
    ]


def refuse_gpu(product: VisionProduct, root: Path, machine: Machine) -> None:
    """Refuse .onnx files on a machine where the networks beside them would be run on a GPU.

    Raises:
        SettingsError: with the first of them.
    """
    for name, candidate in product.candidates.items():
        if machine.uses_gpu and is_onnx(root / candidate.checkpoint):
            raise SettingsError(f"candidates.{name}.checkpoint: {root / candidate.checkpoint}: {HIDE_GPU}")


def describe_slow_formats(product: VisionProduct, machine: Machine) -> list[str]:
    """Warn of candidates in 16 bits on a CPU for which torch has no such convolutions but a plain loop."""
    if machine.uses_gpu or {"avx2", "avx512f"} & {*machine.instruction_sets} != {"avx2"}:
        return []
    slow = [
        name
        for name, candidate in product.candidates.items()
        if any(isinstance(s, PrecisionStep) and s.dtype != "float32" for s in candidate.steps)
    ]
    return (
        [
            f"candidates: {', '.join(slow)}: this CPU has no AVX-512, and without it torch convolves in "
            "16 bits by a plain loop: expect minutes where float32 takes seconds"
        ]
        if slow
        else []
    )


def describe_slow_int8(product: VisionProduct, machine: Machine) -> list[str]:
    """Warn of candidates in INT8 on a machine without instructions for it."""
    names = [name for name, candidate in product.candidates.items() if candidate.quantize]
    if not names:
        return []
    if machine.uses_gpu:
        return [f"candidates: {', '.join(names)}: INT8 is emulated on a GPU: its time is not measured"]
    if {*_INT8_SETS} & {*machine.instruction_sets}:
        return []
    return [
        f"candidates: {', '.join(names)}: this CPU has no instructions for INT8 ({', '.join(_INT8_SETS)}): expect less "
        "gain, and on x86 sums that saturate"
    ]


def _list_categories(evalset: Evalset) -> list[int]:
    return sorted({a.category_id for case in evalset.cases for a in case.annotations if not a.iscrowd})


def _find_unnamed(where: str, settings: DetectionEval, evalset: Evalset) -> list[str]:
    """Say which categories are held by too few clusters to be judged, where there are several: AP hides their loss."""
    clusters: dict[int, set[str]] = {}
    for case in evalset.cases:
        for number in {a.category_id for a in case.annotations if not a.iscrowd}:
            clusters.setdefault(number, set()).add(case.cluster)
    numbers = sorted(clusters)
    few = [
        name
        for name, number in name_categories(settings, evalset.card.categories, numbers).items()
        if len(clusters[number]) < MIN_CATEGORY_CLUSTERS
    ]
    if len(numbers) < 2 or not few:
        return []
    listed = ", ".join(few[:5]) + (" ..." if len(few) > 5 else "")
    return [
        f"{where}.categories: AP is the mean of {len(numbers)} categories, and {len(few)} of them ({listed}) are in "
        f"fewer than {MIN_CATEGORY_CLUSTERS} clusters each, so that one that is lost, 1/{len(numbers)} of AP, may "
        "not show; add pictures of those that matter"
    ]


def _check_sizes(product: VisionProduct, evalsets: dict[str, Evalset]) -> None:
    """Refuse a detector whose AP, or AP of a size that is in its evalset, has no tolerance: the average would hide it.

    A tolerance of a size that no object has is refused, too.
    """
    for name, settings in product.evals.items():
        if not isinstance(settings, DetectionEval):
            continue
        areas = [a.area for case in evalsets[name].cases for a in case.annotations if not a.iscrowd]
        for size, (low, high) in AREAS.items():
            metric = f"{name}/ap" if size == "all" else f"{name}/ap_{size}"
            tolerance = product.gate.tolerances.get(metric)
            count = sum(low <= area <= high for area in areas)
            where = product.locate(f"gate.tolerances.{metric}")
            if count and (tolerance is None or tolerance.overall is None or tolerance.tier == "advisory"):
                given = "an advisory one" if tolerance and tolerance.overall else "none"
                raise SettingsError(
                    f"{where}: expected an overall tolerance that can stop a release, as "
                    f"{settings.evalset!r} has {count} such objects, found {given}: what nothing gates "
                    "may fall unseen; set one"
                )
            for bucket in tolerance.buckets if tolerance else ():
                least, most = settings.areas.get(bucket, AREAS["all"])
                if not any(least <= area <= most for area in areas):
                    raise SettingsError(
                        f"{where}.buckets.{bucket}: evalset {evalsets[name].card.name!r} has no "
                        f"object of {least:g} to {most:g} square pixels, and an empty bucket proves "
                        "nothing; remove it, or add pictures"
                    )
            if not count and tolerance is not None:
                raise SettingsError(
                    f"{where}: evalset {evalsets[name].card.name!r} has no object of that size, and an "
                    "empty bucket proves nothing; remove it, or add pictures"
                )


def _check_adapter(product: VisionProduct, root: Path, functions: Sequence[str]) -> None:
    path = root / product.adapter
    try:
        _check_functions(product.locate("adapter"), path, ast.parse(path.read_text(encoding="utf-8")), functions)
    except FileNotFoundError:
        raise SettingsError(
            f"{product.locate('adapter')}: expected a Python file with build, preprocess and postprocess, "
            f"found none at {str(path)!r}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{product.locate('adapter')}: expected a Python file, got {error}") from None
    except SyntaxError as error:
        raise SettingsError(
            f"{product.locate('adapter')}: {path}{f':{error.lineno}' if error.lineno else ''}: expected "
            f"Python: {error.msg}"
        ) from None


def _check_evalset(where: str, settings: DetectionEval | UpscalingEval, evalset: Evalset, root: Path) -> None:
    """Refuse cases that are there twice, pictures that were changed, and for a detector nothing to detect."""
    folder = root / settings.evalset
    check_each_once(folder / CASES_FILE, evalset.cases)
    check_pictures(folder, evalset.cases)
    check_distinct(folder, evalset.cases, root)
    if not isinstance(settings, DetectionEval):
        return
    if not any(case.annotations for case in evalset.cases):
        raise SettingsError(
            f"{where}.evalset: expected an object on some picture, evalset {evalset.card.name!r} has "
            "none, and AP is about nothing; annotate what should be found"
        )
    known = _list_categories(evalset)
    _check_names(folder / CARD_FILE, settings, evalset)
    check_categories(folder, evalset.card, evalset.cases)
    named = name_categories(settings, evalset.card.categories, known)
    for bucket in sorted((settings.all_areas.keys() | named.keys()) & set(evalset.card.buckets)):
        key, what = ("categories", "a category") if bucket in named else ("areas", "an area")
        raise SettingsError(
            f"{where}.{key}: {bucket!r} is {what} of objects, and a bucket of pictures in evalset "
            f"{evalset.card.name!r}; rename one"
        )
    for bucket, number in settings.categories.items():
        # the card's would take the bucket's place, and what is gated would be another object than was meant
        if (given := evalset.card.categories.get(bucket, number)) != number:
            raise SettingsError(
                f"{where}.categories.{bucket}: expected {given}, which the card of evalset {evalset.card.name!r} gives "
                f"that name, got {number}; correct one of the two, or rename the bucket"
            )
        if number not in known:
            raise SettingsError(
                f"{where}.categories.{bucket}: expected a category that evalset {evalset.card.name!r} "
                f"has ({', '.join(map(str, known))}), got {number}"
            )


def _check_names(path: Path, settings: DetectionEval, evalset: Evalset) -> None:
    """Refuse names of categories that are no buckets."""
    for name in evalset.card.categories:
        if name in settings.all_areas or name in AT_ONE_IOU:
            raise EvalsetError(
                f"{path}: categories.{name}: expected another name than an area's or a threshold's; rename it"
            )


def _check_functions(where: str, path: Path, tree: ast.Module, functions: Sequence[str]) -> None:
    """Refuse a file that can't define the functions, as far as that is seen without running it."""
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    words |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    missing = [name for name in functions if name not in words]
    if missing and "*" not in words:
        raise SettingsError(
            f"{where}: expected {', '.join(functions)} in {path}, found no {missing[0]}; see "
            "pipeline/products/vision/adapters.py"
        )


def _check_enough(product: VisionProduct, num_pictures: int) -> None:
    for name, candidate in product.candidates.items():
        for i, step in enumerate(candidate.steps):
            if isinstance(step, QuantizeStep) and step.num_pictures > num_pictures:
                raise SettingsError(
                    f"candidates.{name}.steps.{i}.num_pictures: expected at most the {num_pictures} of "
                    f"{product.calibration_images!r}, got {step.num_pictures}; add pictures, or ask for fewer"
                )


def _check_folder(where: str, folder: Path, batch_size: int) -> None:
    try:
        path = find_onnx(folder)
        if not folder.is_dir():
            raise SettingsError(
                f"{where}: expected a folder with config.json and model.safetensors, found none at "
                f"{str(folder)!r}; or one with an .onnx file"
            )
        read_config(folder)
        if path is None:
            read_tensors(folder)
        else:
            inspect_onnx(path, batch_size=batch_size)
    except CheckpointError as error:
        raise SettingsError(f"{where}: {error}") from None


def _check_tiling(
    where: str, step: TilingStep, evalsets: dict[str, Evalset], product: VisionProduct, root: Path
) -> None:
    """Refuse an evalset whose pictures fit into one tile: it can't show a seam."""
    for name, evalset in evalsets.items():
        sizes = [measure_picture(root / product.evals[name].evalset / case.image) for case in evalset.cases]
        if all(max(size) <= step.tile for size in sizes):
            raise SettingsError(
                f"{where}: expected a picture larger than a tile in evalset {evalset.card.name!r}, got "
                f"{step.tile} pixels, and its largest has {max(map(max, sizes))}: no seam could show; "
                "add pictures of the size that is served, or tile smaller"
            )


def digest_material(product: VisionProduct, root: Path) -> dict[str, Any]:
    """Return the digests of what results depend on beside candidates."""
    folders = {e.evalset: digest_folder(root / e.evalset, ignore=_NOTES) for e in product.evals.values()}
    reference = product.candidates[product.reference].checkpoint
    return {
        "evalsets": folders,
        "adapter": digest_file(root / product.adapter),
        "reference": digest_watched(reference, root),
    }


def digest_calibration(product: VisionProduct, root: Path) -> dict[str, Any]:
    """Return what quantised weights depend on beside their step; nothing where there are no calibration pictures."""
    if product.calibration_images is None:
        return {}
    folder = root / product.calibration_images
    return {
        "calibration": [product.calibration_images, digest_folder(folder, ignore=_NOTES)],
        "num_threads": product.serving.num_threads,
        "torchao": _read_version("torchao"),  # other libraries are dependencies of every stage
    }


def read_runtime(folder: Path) -> dict[str, str]:
    """Return the version of what runs an .onnx file; nothing of a torch module, whose libraries all stages watch."""
    return {ENGINE: read_version()} if is_onnx(folder) else {}


def _read_version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
