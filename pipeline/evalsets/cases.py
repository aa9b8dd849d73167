"""The cases of an evalset: what each kind carries, and reading `cases.jsonl` with every problem at its line.

A line that the pipeline could not digest later (NaN, half of a surrogate pair) is refused here, so
that what was read once can be evaluated. Whether the cases are those of their card is up to
`cards.py`, and whether the pictures that they name are there up to `pictures.py`.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from pipeline.errors import EvalsetError
from pipeline.records.digests import digest_json
from pipeline.records.files import line_of, open_bounded, read_lines
from pipeline.records.record_files import Record, first_problem

CASES_FILE = "cases.jsonl"
MADE_LIST = "made.yaml"  # beside folders: how a script makes files of theirs (`pipeline/running/made_files.py`)
PICTURE_DIGESTS = {"image": "sha256", "target": "target_sha256"}  # what names a picture: what holds its digest
T = TypeVar("T")


def _check_printable(name: str) -> str:
    if any(unicodedata.category(ch) in ("Cc", "Cf", "Zl", "Zp") for ch in name):
        raise PydanticCustomError("control", "expected no control characters")
    return name


def _check_file_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.+ -]*", name):
        raise PydanticCustomError(
            "file_name",
            "expected letters, digits, '_', '-', '+', '.' and spaces, as it "
            "names the picture's file, starting with a letter or digit",
        )
    return name


def _check_inside(name: str) -> str:
    if "\\" in name or ":" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise PydanticCustomError(
            "path", "expected a path inside the evalset's folder, with '/' between its parts, no '..' and no ':'"
        )
    return name


def _check_sha256(digest: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise PydanticCustomError("sha256", "expected 64 hexadecimal digits in lower case")
    return digest


# Names end up in reports, in terminals and, with an eval's and a metric's, in MLflow's names of 250 characters.
CaseId = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_printable)]
Bucket = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_check_printable)]
FileId = Annotated[CaseId, AfterValidator(_check_file_name)]
PicturePath = Annotated[str, AfterValidator(_check_printable), AfterValidator(_check_inside)]
Sha256 = Annotated[str, AfterValidator(_check_sha256)]
Side = Annotated[float, Field(gt=0)]


class Message(Record):
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Check(Record):
    """One demand on the final state: the value at `path` equals `equals`."""

    path: str
    equals: Any


class Case(Record):
    """What every case has: an id, the cluster it belongs to, and its buckets.

    Attributes:
        card_kind: of an evalset, in its card; a kind of product that has other cases derives their class in its folder.
    """

    card_kind: ClassVar[str]

    id: CaseId
    cluster: str
    buckets: tuple[Bucket, ...] = ()

    @property
    def digest(self) -> str:
        """Sha256 of what the case asks and expects: the key by which cases are paired.

        Its id, cluster and buckets are no part of it: the same question under another id is no second case. Nor are
        the names of pictures, whose digests say what they show.
        """
        return digest_json(self.model_dump(exclude={"id", "cluster", "buckets", *PICTURE_DIGESTS}))


class DocumentCase(Case):
    """A text whose likelihood is measured."""

    card_kind: ClassVar[str] = "documents"
    text: str = Field(min_length=1)


class ChoiceCase(Case):
    """A multiple-choice question."""

    card_kind: ClassVar[str] = "choices"
    question: str
    choices: tuple[str, ...] = Field(min_length=2)
    answer: int = Field(ge=0)

    @field_validator("answer")
    @classmethod
    def _is_a_choice(cls, answer: int, info: ValidationInfo) -> int:
        """Refuse what lm-eval would count as wrong, whatever the model answers."""
        choices = info.data.get("choices")
        if choices is not None and answer >= len(choices):
            raise PydanticCustomError(
                "answer", "expected the index of one of the {num} choices, counted from 0", {"num": len(choices)}
            )
        if choices is not None and choices.count(choices[answer]) > 1:
            raise PydanticCustomError(
                "answer", "expected a choice that is there once, got {text}", {"text": repr(choices[answer])}
            )
        return answer


class AnswerCase(Case):
    """A question that is answered in words, of which one answer counts."""

    card_kind: ClassVar[str] = "answers"
    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class Call(Record):
    """A tool call."""

    name: str
    arguments: dict[str, Any]


class ToolCallCase(Case):
    """A prompt and the one call it should lead to."""

    card_kind: ClassVar[str] = "tool_calls"
    messages: tuple[Message, ...] = Field(min_length=1)
    expected: Call
    accepted: dict[str, tuple[Any, ...]] = {}


class TrajectoryCase(Case):
    """A task, the state it starts in, and what must hold at the end."""

    card_kind: ClassVar[str] = "trajectories"
    messages: tuple[Message, ...] = Field(min_length=1)
    state: dict[str, Any]
    checks: tuple[Check, ...] = Field(min_length=1)


class PromptCase(Case):
    """A prompt for a picture, and the seed of the noise that it is drawn from."""

    card_kind: ClassVar[str] = "prompts"
    id: FileId
    prompt: str
    seed: int = Field(ge=0, lt=2**63)

    @field_validator("prompt")
    @classmethod
    def _is_not_blank(cls, prompt: str) -> str:
        if not prompt.strip():
            raise PydanticCustomError("blank", "expected words")
        return prompt


class Annotation(Record):
    """One object on an image, under COCO's own names."""

    bbox: tuple[float, float, Side, Side]  # left, top, width, height in pixels
    category_id: int = Field(ge=0)
    area: float = Field(gt=0)  # square pixels, of the object's mask where it has one: it decides the size class
    iscrowd: bool = False  # many objects in one box, which detections neither hit nor miss


class DetectionCase(Case):
    """An image and what is on it; no annotation says that nothing is."""

    card_kind: ClassVar[str] = "detection"
    id: FileId
    image: PicturePath
    sha256: Sha256
    annotations: tuple[Annotation, ...]


class UpscalingCase(Case):
    """An image and what it shows at a multiple of its size."""

    card_kind: ClassVar[str] = "upscaling"
    id: FileId
    image: PicturePath
    sha256: Sha256
    target: PicturePath
    target_sha256: Sha256


def list_case_kinds() -> dict[str, type[Case]]:
    """Return the classes of cases by the kind that a card names: those of this file, and those of kinds of products."""
    return {case.card_kind: case for case in Case.__subclasses__()}


def read_cases(path: Path, kind: str) -> list[Any]:
    """Read the cases of an evalset, in the order of the file.

    Raises:
        EvalsetError: with file and line: a malformed or duplicated case, a check whose path the
            state can't hold, a value that can't be digested.
    """
    cases: list[Case] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(_read_lines(path), start=1):
        where = f"{path}:{number}"
        case = _read_case(where, line, list_case_kinds()[kind])
        if case.id in seen:
            raise EvalsetError(f"{where}: case id {case.id!r} was already used on line {seen[case.id]}")
        if isinstance(case, TrajectoryCase):
            _check_state_fields(where, case)
        _check_digest(where, case)
        seen[case.id] = number
        cases.append(case)
    if not cases:
        raise EvalsetError(f"{path}: expected at least one case, found none")
    return cases


def check_distinct(path: Path, cases: Iterable[Case]) -> None:
    """Refuse a case that asks the same as another: counted twice, it would prove more than it does.

    Calibration texts may repeat; nothing is proved with them.
    """
    seen: dict[str, int] = {}
    for number, case in enumerate(cases, start=1):
        if (first := seen.setdefault(case.digest, number)) != number:
            raise EvalsetError(
                f"{path}:{number}: case {case.id!r} asks and expects the same as the case on line "
                f"{first}; every case may count once: remove one"
            )


def _read_lines(path: Path) -> list[str]:
    with open_bounded(path) as file:
        start = file.read(3)
    if start == codecs.BOM_UTF8:
        raise EvalsetError(f"{path}:1: expected UTF-8 without a byte-order mark, found one; save the cases without it")
    try:
        return read_lines(path)
    except UnicodeDecodeError as error:
        raise EvalsetError(f"{path}:{line_of(error)}: not UTF-8 ({error.reason}); save the cases as UTF-8") from None


def _read_case(where: str, line: str, kind: type[Case]) -> Case:
    if not line.strip():
        raise EvalsetError(f"{where}: expected a case, found an empty line; remove it")
    try:
        return kind.model_validate(json.loads(line))
    except json.JSONDecodeError as error:
        said = f"{error.msg} at column {error.colno}"
        raise EvalsetError(f"{where}: expected a line of JSON for each case, got another text ({said})") from None
    except ValidationError as error:
        raise EvalsetError(f"{where}: {first_problem(error)}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand levels
        raise EvalsetError(f"{where}: a value that can't be read: {' '.join(str(error).split())}") from None


def _check_state_fields(where: str, case: TrajectoryCase) -> None:
    for check in case.checks:
        if (field := check.path.split(".")[0]) not in case.state:
            raise EvalsetError(
                f"{where}: a check names {field!r}, which is no field of the state ({', '.join(case.state)})"
            )


def _check_digest(where: str, case: Case) -> None:
    try:
        _ = case.digest
    except ValueError as error:
        raise EvalsetError(f"{where}: a value that JSON in UTF-8 can't hold: {error}") from None


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return `count` items from all over a sequence, in its order; all where there are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
