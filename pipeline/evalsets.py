"""Load an evalset and check it against its card.

An evalset is a folder with `card.yaml` (what it is, who made it, how, its digest, its buckets)
and `cases.jsonl` (one case a line). A user's own set is the same two files. What a case carries
depends on the card's `kind`:

    documents     text
    choices       question, choices, answer (index); read by an lm-eval task YAML beside it
    tool_calls    messages, expected {name, arguments}, optional accepted {argument: [values]}
    trajectories  messages, state, checks; the tools are declared in the card
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

import jsonschema
from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.digests import digest_file, digest_json
from pipeline.errors import EvalsetError
from pipeline.params import describe_yaml_error
from pipeline.records import Record, first_problem, read_lines

CASES_FILE = "cases.jsonl"


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


class Message(Record):
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Check(Record):
    """One demand on the final state: the value at `path` equals `equals`."""

    path: str
    equals: Any


class Case(Record):
    """What every case has: an id, the cluster it belongs to, and its buckets."""

    id: str = Field(min_length=1)
    cluster: str
    buckets: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Sha256 of everything in the case: the key by which cases are paired."""
        return digest_json(self.model_dump())


class DocumentCase(Case):
    """A text whose likelihood is measured."""

    text: str = Field(min_length=1)


class ChoiceCase(Case):
    """A multiple-choice question."""

    question: str
    choices: tuple[str, ...] = Field(min_length=2)
    answer: int


class Call(Record):
    """A tool call."""

    name: str
    arguments: dict[str, Any]


class ToolCallCase(Case):
    """A prompt and the one call it should lead to."""

    messages: tuple[Message, ...] = Field(min_length=1)
    expected: Call
    accepted: dict[str, tuple[Any, ...]] = {}


class TrajectoryCase(Case):
    """A task, the state it starts in, and what must hold at the end."""

    messages: tuple[Message, ...] = Field(min_length=1)
    state: dict[str, Any]
    checks: tuple[Check, ...] = Field(min_length=1)


_CASE_KINDS: dict[str, type[Case]] = {
    "documents": DocumentCase,
    "choices": ChoiceCase,
    "tool_calls": ToolCallCase,
    "trajectories": TrajectoryCase,
}


class Card(Record):
    """What an evalset says about itself."""

    name: str
    version: str
    licence: str
    kind: Literal["documents", "choices", "tool_calls", "trajectories"]
    description: str
    made_by: str  # the command that wrote it
    num_cases: int = Field(ge=1)
    sha256: str  # of cases.jsonl
    cluster: str  # what a cluster is, in words
    num_clusters: int
    buckets: dict[str, int] = {}  # bucket -> number of cases
    tools: dict[str, Tool] = {}


class Evalset(Record):
    """A card and its cases, checked against each other."""

    card: Card
    cases: tuple[Any, ...]
    digest: str


def load_card(folder: Path) -> Card:
    """Read and check `card.yaml`."""
    path = folder / "card.yaml"
    try:
        data = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
        card = Card.model_validate(data)
    except FileNotFoundError:
        raise EvalsetError(f"{path}: expected an evalset card, found no file") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise EvalsetError(f"{path}: not valid YAML: {describe_yaml_error(error)}") from None
    except ValidationError as error:
        raise EvalsetError(f"{path}: {first_problem(error)}") from None
    for name, tool in card.tools.items():
        _check_schema(f"{path}: tools.{name}.parameters", tool.parameters)
    return card


def _check_schema(where: str, schema: dict[str, Any]) -> None:
    """Refuse a broken schema here: in the middle of an eval every call of the tool would crash on it."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        at = ".".join(str(part) for part in error.absolute_path) or "(whole)"
        reason = " ".join(error.message.split())[:120]
        raise EvalsetError(f"{where}: not a JSON Schema: {at}: {reason}") from None


C = TypeVar("C", bound=Case)


def load_evalset(folder: Path) -> Evalset:
    """Read an evalset and check it against its card.

    Raises:
        EvalsetError: with file and line: malformed or duplicated case, wrong digest or count,
            a bucket whose count differs, a check whose path the state can't hold.
    """
    card = load_card(folder)
    path = folder / CASES_FILE
    if not path.is_file():
        raise EvalsetError(f"{path}: expected the cases of evalset {card.name!r}, found no file")
    cases = _read_cases(path, _CASE_KINDS[card.kind])
    _check_against_card(path, card, cases)
    _check_state_fields(path, cases)
    return Evalset(card=card, cases=tuple(cases), digest=digest_json([card.model_dump(), [c.digest for c in cases]]))


def _read_cases(path: Path, kind: type[C]) -> list[C]:
    cases: list[C] = []
    seen: dict[str, int] = {}
    try:
        lines = read_lines(path)
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise EvalsetError(f"{path}:{number}: not UTF-8 ({error.reason}); save the cases as UTF-8") from None
    for number, line in enumerate(lines, start=1):
        case = _read_case(path, number, line, kind)
        if case.id in seen:
            raise EvalsetError(f"{path}:{number}: case id {case.id!r} was already used on line {seen[case.id]}")
        seen[case.id] = number
        cases.append(case)
    if not cases:
        raise EvalsetError(f"{path}: expected at least one case, found none")
    return cases


def _read_case(path: Path, number: int, line: str, kind: type[C]) -> C:
    try:
        return kind.model_validate(json.loads(line))
    except json.JSONDecodeError as error:
        raise EvalsetError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno}): {line[:60]!r}") from None
    except ValidationError as error:
        raise EvalsetError(f"{path}:{number}: {first_problem(error)}") from None


def _check_state_fields(path: Path, cases: list[C]) -> None:
    for number, case in enumerate(cases, start=1):
        if not isinstance(case, TrajectoryCase):
            return
        for check in case.checks:
            if (field := check.path.split(".")[0]) not in case.state:
                raise EvalsetError(f"{path}:{number}: a check names {field!r}, which is no field of the state "
                                   f"({', '.join(case.state)})")  # fmt: skip


def _check_against_card(path: Path, card: Card, cases: list[C]) -> None:
    if len(cases) != card.num_cases:
        raise EvalsetError(f"{path}: the card says {card.num_cases} cases, found {len(cases)}")
    if (found := digest_file(path)) != card.sha256:
        raise EvalsetError(f"{path}: the card says sha256 {card.sha256[:12]}, found {found[:12]}; "
                           "the cases were edited")  # fmt: skip
    counts: dict[str, int] = {}
    for case in cases:
        for bucket in case.buckets:
            counts[bucket] = counts.get(bucket, 0) + 1
    if counts != card.buckets:
        wrong = sorted(b for b in counts.keys() | card.buckets.keys() if counts.get(b) != card.buckets.get(b))[0]
        raise EvalsetError(f"{path}: the card says {card.buckets.get(wrong, 0)} cases in bucket {wrong!r}, "
                           f"found {counts.get(wrong, 0)}")
    if (clusters := len({c.cluster for c in cases})) != card.num_clusters:
        raise EvalsetError(f"{path}: the card says {card.num_clusters} clusters, found {clusters}")
