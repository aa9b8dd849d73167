"""How alike each candidate's pictures are to the reference's, beside the floor: the table of the report.

The numbers are those of the verdict; the floor is the reference's own (`other_seeds.py`).
"""

from __future__ import annotations

import statistics

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.gate.wording import escape_markdown
from pipeline.products.images.findings.likeness import read_floor
from pipeline.products.images.metrics import LIKENESS_SCORE
from pipeline.report.sections import Block, Table

_HEAD = ("eval", "candidate", "mean SSIM", "least alike", "its picture", "equal pictures")

LIKENESS_LEGEND = """\
Likeness is the SSIM of a candidate's picture and the reference's of the same prompt and seed: 1 is the same picture.
The floor is that of two pictures of the reference whose seeds differ: at the floor, only the prompt is in common. An
image that is not sound counts 0."""


def build_likeness_blocks(compared: ReleaseComparison) -> list[Block]:
    """Return a table, the floor before the candidates, and how to read it; nothing where no likeness was measured."""
    name = compared.judgement.policy.reference
    reference = compared.findings[name].evidence
    if reference is None:
        return []
    rows = []
    for eval_name in reference.records:
        judged = {n: row for n, f in compared.findings.items() if n != name and (row := _tabulate(n, f, eval_name))}
        if judged:
            rows += [*_tabulate_floor(name, reference, eval_name), *judged.values()]
    if not rows:
        return []
    return [Table([list(_HEAD), ["---", "---", "---:", "---:", "---", "---:"], *rows]), LIKENESS_LEGEND]


def _tabulate_floor(name: str, reference: Evidence, eval_name: str) -> list[list[str]]:
    if not (floor := read_floor(reference, eval_name)):
        return []
    values = list(floor.values())
    worst = min(floor, key=lambda case_id: floor[case_id])
    label = f"the floor: `{name}` with another seed, {len(values)} prompts"
    return [[eval_name, label, f"{statistics.fmean(values):.4f}", f"{floor[worst]:.4f}", escape_markdown(worst), ""]]


def _tabulate(name: str, findings: CandidateFindings, eval_name: str) -> list[str]:
    """Return the row of a candidate; nothing where its likeness is not known."""
    records = findings.pairs[eval_name].candidate if eval_name in findings.pairs else ()
    by_case = {r.case_id: r.scores[LIKENESS_SCORE] for r in records if LIKENESS_SCORE in r.scores}
    if not by_case:
        return []
    worst = min(by_case, key=lambda case_id: by_case[case_id])
    shown = escape_markdown(worst) if by_case[worst] < 1 else ""
    num_equal = sum(value == 1 for value in by_case.values())
    mean, least = f"{statistics.fmean(by_case.values()):.4f}", f"{by_case[worst]:.4f}"
    return [eval_name, f"`{name}`", mean, least, shown, f"{num_equal} of {len(by_case)}"]
