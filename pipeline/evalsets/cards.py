"""Load an evalset and check it against its card.

An evalset is a folder with `card.yaml` (what it is, who made it, how, its digest, its buckets)
and `cases.jsonl` (one case a line). A user's own set is the same two files; what a person writes
and what `python -m evalsets.seal` adds is in `evalsets/README.md`. What a case carries depends on
the card's `kind`:

    documents     text
    choices       question, choices, answer (index); read by an lm-eval task YAML beside it
    answers       question, answer; read likewise
    tool_calls    messages, expected {name, arguments}, optional accepted {argument: [values]}
    trajectories  messages, state, checks; the tools are declared in the card
    prompts       prompt, seed
    detection     image, sha256, annotations [{bbox, category_id, area, iscrowd}]
    upscaling     image, sha256, target, target_sha256

The last two name picture files of the folder; `pictures.py` reads and checks those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import jsonschema
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError
from ruamel.yaml.error import YAMLError

from pipeline.errors import EvalsetError, EvidenceError, describe_problem
from pipeline.evalsets.cases import CASES_FILE, MADE_LIST, Bucket, Case, list_case_kinds, read_cases
from pipeline.records.digests import canonical_json, digest_file, digest_json
from pipeline.records.files import check_link, read_bounded
from pipeline.records.record_files import Record
from pipeline.settings.base import describe_yaml_error
from pipeline.settings.yaml_files import parse_yaml, read_yaml

CARD_FILE = "card.yaml"
NOTES = frozenset({"README.md"})  # prose beside the cases: editing it changes no result


class Effect(Record):
    """One thing a tool does to the state; `path` and `value` may hold "{argument}" holes."""

    do: Literal["set", "append", "add", "subtract"]
    path: str
    value: Any = None


class Tool(Record):
    """A simulated tool: JSON Schema for its arguments, effects on the state, what it returns.

    `returns` is a template; a string "state:<path>" in it is replaced by the value there.
    """

    description: str = ""
    parameters: dict[str, Any]
    effects: tuple[Effect, ...] = ()
    returns: Any = None
    is_final: bool = False  # the workflow ends after this call

    @field_validator("parameters")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """Refuse a broken schema here: in the middle of an eval every call of the tool would crash on it."""
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            at = ".".join(str(part) for part in error.absolute_path) or "(whole)"
            reason = " ".join(error.message.split())[:120]
            raise PydanticCustomError(
                "json_schema", "not a JSON Schema: {at}: {reason}", {"at": at, "reason": reason}
            ) from None
        return schema


class CardText(Record):
    """What a person writes about an evalset."""

    name: str
    version: str
    licence: str
    kind: str
    description: str
    made_by: str  # the command that wrote it
    cluster: str  # what a cluster is, in words
    tools: dict[str, Tool] = Field(default={}, validate_default=True)
    categories: dict[Bucket, Annotated[int, Field(ge=0)]] = {}  # of detection: name -> category_id

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in (kinds := list_case_kinds()):
            known = [repr(name) for name in kinds]
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(known[:-1])} or {known[-1]}"})
        return kind

    @field_validator("tools")
    @classmethod
    def _are_there(cls, tools: dict[str, Tool], info: ValidationInfo) -> dict[str, Tool]:
        if info.data.get("kind") == "trajectories" and not tools:
            raise PydanticCustomError("missing", "Field required")
        return tools

    @field_validator("categories")
    @classmethod
    def _are_of_objects(cls, categories: dict[str, int], info: ValidationInfo) -> dict[str, int]:
        if categories and info.data.get("kind", "detection") != "detection":
            raise PydanticCustomError(
                "categories",
                "expected none in a card of kind {kind}, whose cases have no objects; remove them or correct the kind",
                {"kind": repr(info.data["kind"])},
            )
        return categories


class Seal(Record):
    """What a card says about `cases.jsonl`: computed, never written by hand."""

    num_cases: int = Field(ge=1)
    sha256: str  # of cases.jsonl
    num_clusters: int
    buckets: dict[str, int] = {}  # bucket -> number of cases


class Card(Seal, CardText):
    """What an evalset says about itself."""


class Evalset(Record):
    """A card and its cases, checked against each other."""

    card: Card
    cases: tuple[Any, ...]
    digest: str


C = TypeVar("C", bound=CardText)
# what a tool that makes a card can't know, and what to write
_BY_HAND = {
    "licence": "under which terms the cases may be used, got {!r}; write them, for example CC-BY-4.0",
    "description": "what the cases are, got {!r}; write it in a sentence",
}
_UNWRITTEN = ("", "TODO")
_WRITTEN = [name for name in CardText.model_fields if name not in ("tools", "categories")]


def load_card(folder: Path) -> Card:
    """Read and check `card.yaml`.

    Raises:
        EvalsetError: no file, no YAML, keys that are missing, unknown or wrong, or texts that nobody wrote yet: all in
            one line.
    """
    card = parse_card(read_card(folder), folder, Card)
    if unwritten := [
        f"{key}: expected {expected.format(getattr(card, key))}"
        for key, expected in _BY_HAND.items()
        if getattr(card, key).strip().upper() in _UNWRITTEN
    ]:
        raise EvalsetError(f"{folder / CARD_FILE}: {'; '.join(unwritten)}")
    return card


def read_card(folder: Path) -> str:
    """Return the text of `card.yaml`.

    Raises:
        EvalsetError: no file, something else, or not UTF-8.
    """
    path = folder / CARD_FILE
    try:
        return read_bounded(path).decode()
    except NotADirectoryError:
        raise EvalsetError(f"{folder}: expected an evalset folder, got a file; name the folder that it is in") from None
    except FileNotFoundError:
        raise EvalsetError(
            f"{path}: expected an evalset card, found no file; write one with {', '.join(_WRITTEN)}, "
            f"and for trajectories tools, then run `python -m evalsets.seal {folder}`"
        ) from None
    except EvidenceError as error:
        raise EvalsetError(str(error)) from None
    except UnicodeDecodeError as error:
        raise EvalsetError(f"{path}: not valid YAML: {error}") from None


def parse_card(text: str, folder: Path, kind: type[C]) -> C:
    """Check the text of a card: as a `CardText`, what `evalsets.seal` computes may be missing or stale.

    Raises:
        EvalsetError: no YAML, or keys that are missing, unknown or wrong: all in one line.
    """
    path = folder / CARD_FILE
    try:
        data = parse_yaml(text)
        if isinstance(data, dict) and not issubclass(kind, Seal):
            data = {key: value for key, value in data.items() if key not in Seal.model_fields}
        card = kind.model_validate({} if data is None else data)
        canonical_json(card.model_dump())
    except YAMLError as error:
        raise EvalsetError(f"{path}: not valid YAML: {describe_yaml_error(error)}") from None
    except ValidationError as error:
        raise EvalsetError(f"{path}: {_name_problems(error.errors(include_url=False), folder)}") from None
    except (TypeError, ValueError) as error:
        raise EvalsetError(f"{path}: a value that JSON can't hold, perhaps a date without quotes: {error}") from None
    return card


def _name_problems(problems: list[ErrorDetails], folder: Path) -> str:
    keys = {kind: [_name_key(p) for p in problems if p["type"] == kind] for kind in ("missing", "extra_forbidden")}
    missing, unknown = keys.values()
    parts = [f"expected {', '.join(missing)}, found none"] if missing else []
    if unknown:
        parts.append(f"unknown {', '.join(unknown)}, remove or correct the spelling")
    parts += [f"{_name_key(p)}: {describe_problem(p)}" for p in problems if p["type"] not in keys]
    if computed := [key for key in missing if key in Seal.model_fields]:
        parts.append(f"`python -m evalsets.seal {folder}` writes {', '.join(computed)}")
    return "; ".join(parts)


def _name_key(problem: ErrorDetails) -> str:
    return ".".join(str(part) for part in problem["loc"]) or "(whole)"


def load_evalset(folder: Path) -> Evalset:
    """Read an evalset and check it against its card.

    Raises:
        EvalsetError: with file and line: what `load_card` and `read_cases` raise, wrong digest or
            count, a bucket whose count differs.
    """
    card = load_card(folder)
    path = folder / CASES_FILE
    cases = load_cases(folder, card)
    _check_seal(path, card, compute_seal(path, cases))
    unnamed = set() if card.categories else {"categories"}  # cards of before names had none to digest
    digest = digest_json([card.model_dump(exclude=unnamed), [case.digest for case in cases]])
    return Evalset(card=card, cases=tuple(cases), digest=digest)


def load_cases(folder: Path, card: CardText) -> list[Any]:
    """Read the cases of a card's kind; raise EvalsetError with file and line."""
    path = folder / CASES_FILE
    if not path.is_file():
        remedy = "; make it by `python -m pipeline.running.made_files`" if _are_made(folder) else ""
        raise EvalsetError(f"{path}: expected the cases of evalset {card.name!r}, found no file{remedy}")
    check_link(path, folder)
    return read_cases(path, card.kind)


def check_categories(folder: Path, card: CardText, cases: Collection[Any]) -> None:
    """Refuse an id with two names, and an annotation whose category the card does not name, where it names any.

    Raises:
        EvalsetError: with the first of them.
    """
    names: dict[int, str] = {}
    for name, number in card.categories.items():
        if (first := names.setdefault(number, name)) != name:
            raise EvalsetError(
                f"{folder / CARD_FILE}: categories.{name}: category {number} is {first!r} already; remove one"
            )
    objects = [(case.id, a.category_id) for case in cases for a in case.annotations] if names else []
    if strangers := [(case_id, number) for case_id, number in objects if number not in names]:
        raise EvalsetError(
            f"{folder / CARD_FILE}: categories: {len(strangers)} annotations have a category_id that is not there, "
            f"first {strangers[0][1]} of case {strangers[0][0]!r}; add it, or correct the case"
        )


def _are_made(folder: Path) -> bool:
    """Whether a script of the project makes the cases of an evalset, and not just files that they name."""
    try:
        files = read_yaml(folder.parent / MADE_LIST)[folder.name]["files"]
    except (OSError, YAMLError, KeyError, TypeError):
        return False  # a list that is broken is refused by who makes files
    return isinstance(files, Mapping) and CASES_FILE in files


def compute_seal(path: Path, cases: Collection[Case]) -> Seal:
    """Say what a card must say about the cases that a file holds."""
    buckets = Counter(bucket for case in cases for bucket in set(case.buckets))
    return Seal(
        num_cases=len(cases),
        sha256=digest_file(path),
        num_clusters=len({case.cluster for case in cases}),
        buckets=dict(sorted(buckets.items())),
    )


def _check_seal(path: Path, card: Card, seal: Seal) -> None:
    if problem := _find_difference(card, seal):
        raise EvalsetError(
            f"{path}: the card says {problem}; if the cases were meant to change, run "
            f"`python -m evalsets.seal {path.parent}`"
        )


def _find_difference(card: Card, seal: Seal) -> str | None:
    if seal.num_cases != card.num_cases:
        return f"{card.num_cases} cases, found {seal.num_cases}"
    if seal.sha256 != card.sha256:
        return f"sha256 {card.sha256[:12]}, found {seal.sha256[:12]}: the cases were edited"
    for bucket in sorted(seal.buckets.keys() | card.buckets.keys()):
        says, has = card.buckets.get(bucket, 0), seal.buckets.get(bucket, 0)
        if says != has:
            return f"{says} cases in bucket {bucket!r}, found {has}"
    if seal.num_clusters != card.num_clusters:
        return f"{card.num_clusters} clusters, found {seal.num_clusters}"
    return None
