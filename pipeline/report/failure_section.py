"""The cases behind a failure or an open verdict, as a section: those that lost most, and those that flipped."""

from __future__ import annotations

from pipeline.gate.wording import escape_markdown
from pipeline.report.explanation_records import CandidateExplanation, ExplainedFlip, LostCases, describe_place
from pipeline.report.sections import Block, Folded, Quote, Section, Table

_MAX_FLIPS = 5


def build_failure_section(explained: CandidateExplanation, *, given: str) -> Section:
    """Return the section on the cases of one candidate.

    Args:
        explained: of the candidate.
        given: the word for the input of a case whose output is no text and is only named; "" where outputs are texts.
    """
    blocks: list[Block] = []
    for lost in explained.lost:
        blocks += [f"{escape_markdown(lost.title)}:", _tabulate(lost)]
    flips = explained.flips[:_MAX_FLIPS]
    if not given:
        blocks += map(fold_flip, flips)
    elif flips:
        rows = [[flip.kind, escape_markdown(flip.case_id), escape_markdown(flip.prompt.text)] for flip in flips]
        blocks += [
            "Images that became unsound (loss) or sound (gain):",
            Table([["", "image", given], ["---"] * 3, *rows]),
        ]
    return Section(
        "Cases behind it", [*blocks, f"All cases: `{explained.folder}/`, side by side in MLflow (`make ui`)."]
    )


def fold_flip(flip: ExplainedFlip) -> Folded:
    """Return a case that can be unfolded: what was asked, and what both sides answered."""
    buckets = f" [{', '.join(flip.buckets)}]" if flip.buckets else ""
    case = escape_markdown(f"{flip.eval_name} / {flip.case_id}{buckets}: {describe_place(flip)}")
    blocks: list[Block] = ["Prompt:", Quote(flip.prompt.text)]
    for side, passage in ((flip.against, flip.reference), ("candidate", flip.candidate)):
        if passage is not None:
            blocks += [f"{side[0].upper()}{side[1:]}:", Quote(passage.text)]
    return Folded(f"<b>{flip.kind}</b> {case}", blocks)


def _tabulate(lost: LostCases) -> Table:
    rows = [list(lost.columns), ["---"] + ["---:"] * (len(lost.columns) - 1)]
    return Table(rows + [[escape_markdown(cell) for cell in row] for row in lost.rows])
