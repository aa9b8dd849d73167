"""params.yaml as a typed, strict, frozen object: the only validator of user settings.

Every stage calls `load_params` first, so whichever runs first validates the whole file: unknown
keys, wrong types and impossible combinations are refused with the path of the key. Checks that
need a file beside params.yaml (layer shapes, an evalset's buckets) are the kinds' `check`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml.error import YAMLError

from pipeline.errors import SettingsError, describe_problem, format_key, show_value, suggest
from pipeline.products import KINDS
from pipeline.running.environment import count_workers
from pipeline.settings.base import Product, describe_yaml_error
from pipeline.settings.execution import Execution, LocalExecution, RayExecution
from pipeline.settings.key_paths import KeyPaths, find_wrong_key
from pipeline.settings.yaml_files import read_yaml

P = TypeVar("P", bound=Product)

PARAMS = Path("params.yaml")
_EXECUTION: TypeAdapter[LocalExecution | RayExecution] = TypeAdapter(Execution)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
# what no node needs: results, databases, tests; nor what begins with a dot, as environments and caches do
_NOT_SENT = ("build", "reports", "release", "mlartifacts", "mlruns", "mlflow.db", "tests")
_SECTIONS = ("products", "candidates", "execution")
_OWN_KEYS = ("name", "candidates")  # of a product, which do not stand in its section
RESERVED = ("env",)  # names of folders beside those of the products


@dataclass(frozen=True)
class Params:
    """The whole of params.yaml: its products by name, each with its own candidates, and where work is done."""

    products: dict[str, Product]
    execution: LocalExecution | RayExecution = LocalExecution()


def find_owner(params: Params, candidate: str, *, kind: type[P]) -> P:
    """Return the product of a candidate.

    Args:
        params: the whole file.
        candidate: as in `candidates`.
        kind: class of the product; `Product` is any.

    Raises:
        SettingsError: no product of this kind has a candidate of this name.
    """
    owners = [product for product in params.products.values() if isinstance(product, kind)]
    for product in owners:
        if candidate in product.candidates:
            return product
    known = ", ".join(name for product in owners for name in product.candidates)
    raise SettingsError(f"candidates: expected one of {known or 'a product of this kind'}, got {candidate!r}")


def load_params(path: Path = PARAMS) -> Params:
    """Read and validate params.yaml.

    Raises:
        SettingsError: with the key's path, what was expected and what came.
    """
    return parse_params(read_settings(path), where=str(path))


def read_settings(path: Path) -> Any:
    """Read a settings file as YAML.

    Raises:
        SettingsError: there is none, or it is no YAML.
    """
    try:
        return read_yaml(path)
    except FileNotFoundError:
        raise SettingsError(f"{path}: expected the settings file, found none; run from the project root") from None
    except YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML: {describe_yaml_error(error)}") from None


def get_product(params: Params, name: str, *, kind: type[P]) -> P:
    """Return a product by its name.

    Args:
        params: the whole file.
        name: as in `products`.
        kind: its class; `Product` is any.

    Raises:
        SettingsError: there is no such product of this kind.
    """
    of_kind = {name: product for name, product in params.products.items() if isinstance(product, kind)}
    if name not in of_kind:
        raise SettingsError(f"products: expected {' or '.join(of_kind) or 'one of this kind'}, got {name!r}")
    return of_kind[name]


def choose_product(params: Params, name: str | None, *, kind: type[P]) -> P:
    """Return the named product, or without a name the only one of its kind.

    Raises:
        SettingsError: there is none, or several to choose from.
    """
    names = [known for known, product in params.products.items() if isinstance(product, kind)]
    if name is None and len(names) != 1:
        raise SettingsError(f"expected the name of a product ({', '.join(names) or 'there is none of this kind'})")
    return get_product(params, name or names[0], kind=kind)


def list_texts(params: Params) -> set[str]:
    """Return all texts of the products' settings, at any depth: paths are among them."""
    texts, open_values = set[str](), [product.model_dump(mode="json") for product in params.products.values()]
    while open_values:
        value: Any = open_values.pop()
        if isinstance(value, str):
            texts.add(value)
        elif isinstance(value, dict | list):
            open_values += value.values() if isinstance(value, dict) else value
    return texts


def list_project_files(params: Params, product: Product, name: str) -> list[Path]:
    """List the files that a node needs to make and evaluate a candidate: all but results and other checkpoints.

    A checkpoint of another candidate is needed where this one names it, or a file in it: as its draft, say. A link to a
    folder is followed where it leads to or lies in what the settings name.

    Args:
        params: the whole file, which lies in the current folder.
        product: that owns the candidate.
        name: of the candidate.
    """
    others = {Path(c.checkpoint) for p in params.products.values() for c in p.candidates.values()}
    named = {Path(text) for text in list_texts(Params({product.name: product.restrict((name, product.reference))}))}
    others -= {folder for path in named for folder in (path, *path.parents)}
    skipped = {*map(Path, _NOT_SENT), *others}
    own = product.build / "candidates" / name
    paths = _walk(Path(), skipped, named - {Path()}, (os.path.realpath("."),))
    return sorted([*paths, *(path for path in own.rglob("*") if path.is_file())])


def _walk(folder: Path, skipped: Collection[Path], named: Collection[Path], above: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files below a folder; a link to one that holds a folder on the way here, `above`, is not followed."""
    for path in folder.iterdir():
        if path in skipped or path.name == "__pycache__" or path.name.startswith("."):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and (
            not path.is_symlink() or any(path.is_relative_to(own) or own.is_relative_to(path) for own in named)
        ):
            real = os.path.realpath(path)
            if not any(Path(one).is_relative_to(real) for one in above):
                yield from _walk(path, skipped, named, (*above, real))


def parse_params(data: Any, where: str = "params.yaml") -> Params:
    """Validate settings that were already read from YAML.

    Raises:
        SettingsError: with the key's path, what was expected and what came.
    """
    try:
        return _parse(data)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None


def _parse(data: Any) -> Params:
    sections = _read_sections(data)
    execution = _parse_execution(sections.pop("execution"))
    for name, section in sections["products"].items():
        _check_section(name, section)
    owned: dict[str, dict[str, Any]] = {name: {} for name in sections["products"]}
    for name, candidate in sections["candidates"].items():
        owner = _read_owner(name, candidate, owned)
        owned[owner][name] = {k: v for k, v in candidate.items() if k != "product"}
    # a stage that works on this machine, as the benchmark does, has these whatever a cluster has
    local = execution if isinstance(execution, LocalExecution) else LocalExecution()
    num_workers = count_workers() if local.num_workers == "auto" else local.num_workers
    products = {
        name: _parse_product(name, section, owned[name], num_workers) for name, section in sections["products"].items()
    }
    for product in products.values():
        for problem in KINDS[product.kind].find_problems(product):
            raise SettingsError(product.locate(problem))
    return Params(products, execution)


def _parse_execution(section: Any) -> LocalExecution | RayExecution:
    try:
        return _EXECUTION.validate_python({"kind": "local"} if section is None else section)
    except ValidationError as error:
        raise SettingsError(_one_line(error, section, _EXECUTION.json_schema(), ["execution"])) from None


def _read_sections(data: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for key in data if isinstance(data, Mapping) else ():
        if key not in _SECTIONS:
            remedy = suggest(key, _SECTIONS) or "remove it, or move it into a product"
            raise SettingsError(f"{format_key(key)}: expected one of {', '.join(_SECTIONS)}, got another key; {remedy}")
    for key, what in (
        ("products", "a mapping from each product's name to its settings"),
        ("candidates", "a mapping from each candidate's name to its settings"),
    ):
        section = data.get(key) if isinstance(data, Mapping) else None
        if not isinstance(section, Mapping) or not section:
            raise SettingsError(f"{key}: expected {what}, {_format_value(section)}")
        sections[key] = dict(section)
    return sections | {"execution": data.get("execution")}


def _format_value(value: Any) -> str:
    return "found none" if value in (None, {}, "") else f"got {show_value(value)}"


def _choose(where: str, entry: Any, key: str, known: Collection[str]) -> str:
    """Return what an entry has under a key, which must be one of some; name one that may be the key misspelt."""
    entry = {} if entry is None else entry
    if not isinstance(entry, Mapping):
        raise SettingsError(f"{where}: expected keys with values, got {show_value(entry)}")
    value = entry.get(key)
    if isinstance(value, str) and value in known:
        return value
    misspelt = [f", but `{format_key(other)}`" for other in entry if key not in entry and suggest(other, [key])]
    came = _format_value(value) + "".join(misspelt[:1])
    raise SettingsError(f"{where}.{key}: expected one of {', '.join(known)}, {came}")


def check_name(where: str, name: Any, *, reserved: Collection[str] = ()) -> str:
    """Return the path of a product or candidate, whose name must be fit for a folder.

    Args:
        where: it stands.
        name: as YAML read it.
        reserved: names that are taken.

    Raises:
        SettingsError: it is not fit.
    """
    path = f"{where}.{format_key(name)}"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in reserved:
        but = "".join(f", and not {word!r}" for word in reserved)
        remedy = "" if isinstance(name, str) else "; write it in quotes"
        raise SettingsError(
            f"{path}: expected a name of lower-case letters, digits and dashes that begins with no dash{but}, "
            f"got {show_value(name)}{remedy}"
        )
    return path


def _check_section(name: str, section: Any) -> None:
    where = check_name("products", name, reserved=RESERVED)
    _choose(where, section, "kind", KINDS)
    for key in _OWN_KEYS:
        if key in section:
            raise SettingsError(f"{where}.{key}: unknown key; candidates stand in `candidates`, and name their product")


def _read_owner(name: str, candidate: Any, owned: Mapping[str, Any]) -> str:
    return _choose(check_name("candidates", name), candidate, "product", owned)


def _parse_product(name: str, section: Mapping[str, Any], candidates: dict[str, Any], num_workers: int) -> Product:
    if not candidates:
        raise SettingsError(f"products.{name}: expected a candidate that names it as its product, found none")
    settings = KINDS[section["kind"]].settings
    data = {**section, "name": name, "candidates": candidates}
    resources = section.get("resources", {})
    chosen = {}
    if "resources" in settings.model_fields and isinstance(resources, Mapping):
        chosen = {"resources": {settings.workers_key: num_workers, **resources}}
    try:
        return settings.model_validate(data | chosen)
    except ValidationError as error:
        raise SettingsError(_one_line(error, data, settings.model_json_schema(), ["products", name])) from None


def _one_line(error: ValidationError, data: Any, schema: Mapping[str, Any], section: Sequence[str]) -> str:
    """Say where the problem is, what was expected and what came; of an unknown key also which one may be meant.

    Args:
        error: pydantic's.
        data: that it is about.
        schema: of the data, as JSON schema.
        section: keys of the file below which the data stand; candidates stand in a section of their own.
    """
    problems, paths = error.errors(include_url=False), KeyPaths(schema)
    # a misspelled key is two problems, and the spelling that came says more than the one that is missing
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    wrong_key = find_wrong_key(problem)
    keys = list(paths.drop_tags(wrong_key or problem["loc"], data))
    where = ".".join(map(format_key, keys if keys[:1] == ["candidates"] else [*section, *keys]))
    if wrong_key:
        return f"{where}: expected text as a key, got {show_value(wrong_key[-1])}; write it in quotes"
    if problem["type"] != "extra_forbidden":
        # a value that may be of several types is a problem for each
        others = [p for p in problems if p is not problem and list(paths.drop_tags(p["loc"], data)) == keys]
        return f"{where}: {describe_problem(problem, *others)}"
    *above, key = problem["loc"]
    if owners := [f"`{name}`" for name in paths.list_owners(str(key), above)]:
        return f"{where}: unknown key here; one of this name stands in {' and in '.join(owners)}"
    # no product's section has these, while a key may well belong below one of them
    known = [name for name in paths.list_keys(above) if above or name not in _OWN_KEYS]
    return ": ".join(filter(None, (where, describe_problem(problem), suggest(key, known))))
