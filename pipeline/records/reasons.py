"""Why a verdict is what it is: a kind that code decides by, and words for people."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import model_validator

from pipeline.records.record_files import Record


class ReasonKind(StrEnum):
    """What a reason means for its verdict."""

    HEADLINE = "headline"  # what an average hides
    REFUSED = "refused"  # evidence that is not fit
    FAILED = "failed"  # a loss that no comparison stands for: of drafts, path or speed
    UNPROVEN = "unproven"  # what no comparison stands for, and keeps a pass from being one
    NO_GAIN = "no gain"  # it is there for speed alone, and is not faster
    LOST = "lost"  # a comparison that fails
    OPEN = "open"  # a comparison that proves nothing
    SUSPICIOUS = "suspicious"  # a gain larger than is believed
    CAUSE = "cause"  # what made outputs unfit for use
    LIMIT = "limit"  # what the verdict does not cover, or takes somebody's word for
    NOTE = "note"

    @property
    def is_note(self) -> bool:
        """It decides nothing."""
        return self in _NOTES


_NOTES = (ReasonKind.SUSPICIOUS, ReasonKind.CAUSE, ReasonKind.LIMIT, ReasonKind.NOTE)
_WORDS = {
    ReasonKind.HEADLINE: "",
    ReasonKind.REFUSED: "refused: ",
    ReasonKind.FAILED: "fail: ",
    ReasonKind.UNPROVEN: "inconclusive: ",
    ReasonKind.NO_GAIN: "no gain: ",
    ReasonKind.LOST: "fail: ",
    ReasonKind.OPEN: "inconclusive: ",
} | dict.fromkeys(_NOTES, "note: ")
# how sentences started when a reason was a sentence alone; the first that fits holds
_OLD = (
    ("refused: ", ReasonKind.REFUSED),
    *((f"fail: {what}: ", ReasonKind.FAILED) for what in ("speculation", "path", "speed")),
    ("fail: ", ReasonKind.LOST),
    ("inconclusive: canary: ", ReasonKind.UNPROVEN),
    ("inconclusive: ", ReasonKind.OPEN),
    ("no gain: ", ReasonKind.NO_GAIN),
    ("note: images: ", ReasonKind.CAUSE),
    ("note: not gated: ", ReasonKind.LIMIT),
    ("note: gain accepted: ", ReasonKind.LIMIT),
    ("note: its fingerprint is declared", ReasonKind.LIMIT),
    ("note: speed: gate.max_slowdown was not applied", ReasonKind.LIMIT),
    ("note: ", ReasonKind.NOTE),
    ("", ReasonKind.HEADLINE),
)


class Reason(Record):
    """One reason of a verdict; as a text it starts with the word for its kind."""

    kind: ReasonKind
    text: str

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, data: Any) -> Any:
        """Take a sentence of before reasons had kinds, which told them by how they started."""
        if not isinstance(data, str):
            return data
        kind = next(kind for start, kind in _OLD if data.startswith(start))
        return {"kind": kind, "text": data.removeprefix(_WORDS[kind])}

    def __str__(self) -> str:
        """Return the sentence."""
        return f"{_WORDS[self.kind]}{self.text}"
