"""Start a product in params.yaml: `quantgate init`.

Its kind chooses the smallest settings that run and writes example cases. All is checked before params.yaml is
written, and what was there keeps its comments and its layout. The shipped products go on request, with all that git
holds of their runs; their models and evalsets stay, as tests and benchmarks need them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from pipeline.errors import SettingsError, SizeError
from pipeline.product import Start
from pipeline.products import KINDS
from pipeline.products.params import PARAMS, RESERVED, Params, check_name, parse_params, read_settings
from pipeline.records.files import replace_whole, write_text
from pipeline.running.environment import read_machine
from pipeline.running.stage_code import list_stages
from pipeline.settings.base import METRICS, RELEASE, REPORTS, Product
from pipeline.settings.hub_names import SCHEME, find_unpinned
from pipeline.settings.yaml_blocks import add_entry, remove_entries
from pipeline.settings.yaml_files import parse_yaml, read_text

_LOCK = Path("dvc.lock")
_PROJECT = Path("pyproject.toml")  # names the shipped products
_KEPT = (RELEASE, REPORTS, METRICS)  # what git holds of a product's runs
_BOUNDLESS_MIB = 1 << 40  # of a machine that nothing is too large for


def init_product(
    name: str, kind: str, checkpoint: str, options: Mapping[str, str], *, root: Path, remove_shipped: bool = False
) -> list[str]:
    """Write a section of params.yaml with candidates and example cases.

    Args:
        name: of the product and its reference.
        kind: of the product.
        checkpoint: as params.yaml names it.
        options: of the kind.
        root: of the project.
        remove_shipped: take the shipped products out of the project.

    Returns:
        Lines that say what is there and what to do next.

    Raises:
        QuantgateError: one line on what stands in the way; nothing was written.
    """
    data = read_settings(root / PARAMS)
    before = parse_params(data)
    removed = _list_shipped(before, root) if remove_shipped else []
    _check_options(kind, options)
    checkpoint = _name_from_root(checkpoint, root)
    options = {option: _name_from_root(path, root) for option, path in options.items()}
    _check_places(kind, checkpoint, options)
    _check_name(name, before, root)
    start = KINDS[kind].start_product(name, checkpoint, root, options)
    text = _edit_params(read_text(root / PARAMS), data, start, removed)
    _check_new(start, root)
    if removed:
        _check_held_by_git(removed, root)
    try:
        _write_files(start, root)
        product = parse_params(parse_yaml(text)).products[name]
        warnings = _check_anywhere(product, root)
    except BaseException:
        for folder in _list_folders(start):
            shutil.rmtree(root / folder, ignore_errors=True)
        raise
    write_text(root / PARAMS, text)
    _remove_results(before, removed, root)
    warnings += start.warnings
    warnings += [
        f"{path}: it lies outside of the project, where no other clone has it; copy it here, and name the copy in "
        f"{PARAMS}, where it is named now"
        for path in (checkpoint, *(path for option, path in options.items() if option != "task"))
        if not path.startswith(SCHEME) and _is_outside(path, root)
    ]
    return [*(f"warning: {line}" for line in warnings), *_describe(name, start, removed)]


def _check_anywhere(product: Product, root: Path) -> list[str]:
    """Return warnings; that a model is too large for this machine is one, as another may run it.

    Raises:
        QuantgateError: what stands in the way on any machine.
    """
    check, machine = KINDS[product.kind].check, read_machine()
    try:
        return check(product, root, machine, is_local=False)
    except SizeError as error:
        boundless = machine.model_copy(update={"memory_mib": _BOUNDLESS_MIB, "gpus": ()})
        return [str(error), *check(product, root, boundless, is_local=False)]


def _check_options(kind: str, options: Mapping[str, str]) -> None:
    if kind not in KINDS:
        raise SettingsError(f"--kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    for option in options:
        if option not in KINDS[kind].start_options:
            raise SettingsError(f"--{option}: expected none with kind {kind}, got {options[option]!r}; remove it")


def _name_from_root(path: str, root: Path) -> str:
    """Return a path in the project as params.yaml names it, which is true in every clone."""
    place = Path(path)
    for parent in place.parents if place.is_absolute() else ():
        if parent.resolve() == root.resolve():  # also where a link leads to it, and not where one leads out of it
            return place.relative_to(parent).as_posix()
    return path


def _is_outside(path: str, root: Path) -> bool:
    """Say whether a path leads out of the project; a link in it may lead where it will."""
    return not Path(os.path.abspath(root / path)).is_relative_to(os.path.abspath(root))


def _check_places(kind: str, checkpoint: str, options: Mapping[str, str]) -> None:
    """Refuse what params.yaml would have to quote, and a model of a hub that can't be had from there."""
    for option, path in {"checkpoint": checkpoint, **options}.items():
        if not re.fullmatch(r"[\w./:@+-]+", path):
            raise SettingsError(f"--{option}: expected letters, digits and ._/:@+-, got {path!r}; rename it")
        if not _is_text(path):
            raise SettingsError(
                f"--{option}: expected a path that is text in YAML, got a number, a date or the like; write it as "
                f"./{path}, or rename it"
            )
    if problem := find_unpinned(checkpoint):
        raise SettingsError(f"--checkpoint: {problem}")
    if checkpoint.startswith(SCHEME) and not KINDS[kind].settings.takes_hub_models:
        raise SettingsError(f"--checkpoint: expected a folder of the project with kind {kind}, got {checkpoint!r}")


def _check_name(name: str, params: Params, root: Path) -> None:
    """Refuse a name that is not fit, that YAML would read as something else, or that is taken."""
    where = check_name(f"{PARAMS}: products", name, reserved=RESERVED)
    if not _is_text(name):
        raise SettingsError(
            f"{where}: expected a name that is text in YAML, got a number, a date or the like; choose another, such as "
            f"bot-{name}"
        )
    owners = {own: product.name for product in params.products.values() for own in product.candidates}
    if name in params.products:
        raise SettingsError(
            f"products.{name}: expected a new name, it is in {PARAMS} already; go on with it by `dvc repro "
            f"gate@{name}`, or choose another"
        )
    if name in owners:
        raise SettingsError(f"candidates.{name}: expected a new name, {owners[name]!r} has it already; choose another")
    if (root / RELEASE / name).exists():
        raise SettingsError(f"{RELEASE / name}: expected no release of a new product; choose another name")


def _is_text(name: str) -> bool:
    try:
        return isinstance(parse_yaml(name), str)
    except YAMLError:  # a date that is none
        return False


def _check_new(start: Start, root: Path) -> None:
    for folder in _list_folders(start):
        if (root / folder).exists():
            raise SettingsError(f"{folder}: expected no such folder yet; choose another name, or remove it")


def _list_folders(start: Start) -> list[Path]:
    """Return the evalsets that it writes."""
    return list(dict.fromkeys(Path(*path.parts[:2]) for path in start.files))


def _list_shipped(params: Params, root: Path) -> list[str]:
    """Return the products that came with the project and are still there."""
    project = tomllib.loads((root / _PROJECT).read_text(encoding="utf-8"))
    shipped = project["tool"]["quantgate"]["shipped"]
    if present := [name for name in params.products if name in shipped]:
        return present
    raise SettingsError(f"--remove-shipped: expected one of {', '.join(shipped)} in {PARAMS}, found none; leave it out")


def _edit_params(text: str, data: Mapping[str, Any], start: Start, removed: Collection[str]) -> str:
    """Return params.yaml with the product and without those that are removed, and see that nothing else changed."""
    new = {"products": start.section, "candidates": start.candidates}
    gone = {
        "products": set(removed),
        "candidates": {name for name, own in data["candidates"].items() if own["product"] in removed},
    }
    wanted: dict[str, Any] = dict(data)
    try:
        for block, entry in new.items():
            text = remove_entries(add_entry(text, block, entry), block, gone[block])
            kept = {name: own for name, own in data[block].items() if name not in gone[block]}
            added = parse_yaml(entry)
            if taken := sorted(kept.keys() & added.keys()):
                raise SettingsError(f"{block}.{taken[0]}: expected a new name, it is in {PARAMS} already")
            wanted[block] = kept | added
        found = parse_yaml(text)
    except YAMLError as error:
        raise SettingsError(f"{PARAMS}: {error}; add the product by hand (docs/your-model.md)") from None
    if found != wanted:
        raise SettingsError(f"{PARAMS}: expected one entry a line in products and candidates; add the product by hand")
    return text


def _check_held_by_git(removed: Collection[str], root: Path) -> None:
    """Refuse to remove what git could not bring back."""
    paths = [PARAMS, _LOCK, *(folder / name for folder in _KEPT for name in removed)]
    command = ["git", "status", "--porcelain", "--", *map(str, paths)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SettingsError(f"--remove-shipped: expected a clone under git, {done.stderr.strip().splitlines()[0]}")
    if changed := done.stdout.splitlines():
        raise SettingsError(f"--remove-shipped: expected {changed[0][3:]} as git holds it, found changes; commit them")


def _write_files(start: Start, root: Path) -> None:
    for path, content in start.files.items():
        with replace_whole(root / path) as temporary:
            temporary.write_bytes(content)


def _remove_results(params: Params, removed: Collection[str], root: Path) -> None:
    """Remove what git holds of products' runs, and their stages from DVC's lock."""
    names = [*removed, *(name for product in removed for name in params.products[product].candidates)]
    for folder in _KEPT:
        for name in removed:
            shutil.rmtree(root / folder / name, ignore_errors=True)
    if removed and (root / _LOCK).is_file():
        stages = {f"{stage}@{name}" for stage in list_stages(root) for name in names}
        write_text(root / _LOCK, remove_entries((root / _LOCK).read_text(encoding="utf-8"), "stages", stages))


def _describe(name: str, start: Start, removed: Collection[str]) -> list[str]:
    """Say what is there, and in three lines what to do next."""
    folders = [str(folder) for folder in _list_folders(start)]
    candidates = " and ".join(parse_yaml(start.candidates))
    gone = f"; removed {', '.join(removed)}: their models and evalsets are still there" if removed else ""
    return [
        f"{PARAMS}: added product {name} with candidates {candidates}; examples are in {' and '.join(folders)}{gone}",
        f"next: `dvc repro gate@{name}` runs the examples to a first verdict; nothing is released by them, "
        "and a model that can't do them is refused: go on to your own cases then",
        f"then: put your own cases into {' and '.join(f'{folder}/cases.jsonl' for folder in folders)}, and run "
        f"`python -m evalsets.seal {folders[0]}`{', and of the others alike' * (len(folders) > 1)}",
        "then: set the tolerances, see by `make plan` what your cases can prove, and run `make repro`",
    ]
