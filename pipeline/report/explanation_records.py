"""What explains a verdict other than pass: the cases behind it, cut to what a person reads.

`compare` writes an Explanation a product beside its verdict; the page, the summary in CI and the report show it. A text
here is as the model wrote it, but for its length: whoever shows it escapes it. Free of numpy, as the gate reads it.
"""

from __future__ import annotations

from typing import Literal

from pipeline.records.record_files import Record


class Passage(Record):
    """A text cut to the neighbourhood of the first difference; nothing is marked where there is none."""

    before: str
    marked: str  # from the first difference to where the line agrees again; "" where the text lacks what the other has
    after: str
    num_before: int  # characters that were cut off in front
    num_after: int

    @property
    def text(self) -> str:
        """The passage as one text, with an ellipsis where something was cut off."""
        whole = self.before + self.marked + self.after
        return ("… " if self.num_before else "") + whole + (" …" if self.num_after else "")


class ExplainedFlip(Record):
    """One case whose judgement changed, or one answer of the canary that the path changed.

    `line`, `character` and `token` are 0-based places of the first difference; None where outputs are equal or where
    the place is not known.
    """

    kind: Literal["loss", "gain", "path"]  # loss: reference right, candidate wrong
    eval_name: str
    case_id: str
    buckets: tuple[str, ...]
    prompt: Passage
    against: str = "reference"  # whose output the candidate's is set beside
    reference: Passage | None  # None: outputs are pictures
    candidate: Passage | None
    line: int | None = None
    character: int | None = None
    token: int | None = None
    margin: float | None = None  # nat, by which the reference's token was ahead of the second most likely one there
    why_no_margin: str = ""

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything to set side by side: pictures, or texts on some side."""
        return None in (self.reference, self.candidate) or any(
            side and side.text for side in (self.reference, self.candidate)
        )


class LostCases(Record):
    """The cases that lost most of one comparison that counts no flips, as a table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class CandidateExplanation(Record):
    """What is shown of one candidate: flips, losses first, then cases by what they lost."""

    candidate: str
    folder: str  # with all cases
    flips: tuple[ExplainedFlip, ...]
    lost: tuple[LostCases, ...]


class Explanation(Record):
    """What is shown of a product (`reports/explanation.json`): candidates that failed or were left open."""

    schema_version: Literal[1] = 1
    candidates: tuple[CandidateExplanation, ...]

    def of(self, candidate: str) -> CandidateExplanation | None:
        """Return what is shown of a candidate."""
        return next((found for found in self.candidates if found.candidate == candidate), None)


def describe_place(flip: ExplainedFlip) -> str:
    """Say where two outputs first differ, and how far the token there was ahead of the next one, where known."""
    if not flip.has_outputs:
        return "the records hold no outputs"
    if flip.character is None:
        return "the outputs are equal" if flip.token is None else f"the texts are equal, token {flip.token} is not"
    place = f"first difference in line {(flip.line or 0) + 1}, character {flip.character}"
    if flip.margin is None:
        return place
    return f"{place} (token {flip.token}, which was ahead by {flip.margin:.2g} nat)"
