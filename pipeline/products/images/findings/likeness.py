"""How alike a candidate's pictures are to the reference's, as the gate and the report read it; nothing is opened here.

The reference is as alike to itself as can be: 1, by definition. So is a candidate whose pictures are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from pipeline.errors import EvidenceError
from pipeline.gate.audits import CandidateFindings
from pipeline.gate.case_table import CaseTable
from pipeline.gate.pairing import Evidence
from pipeline.products.images.findings.decoder import read_notes
from pipeline.products.images.metrics import LIKENESS, LIKENESS_SCORE
from pipeline.products.images.settings import ImagesProduct
from pipeline.records.kept_outputs import name_picture
from pipeline.records.likeness import Likeness, PictureLikeness
from pipeline.records.record_files import read_record
from pipeline.settings.base import Tolerance

FOLDER = "benchmarks"  # what the stage of that name writes


def locate_likeness(build: Path, name: str) -> Path:
    """Return the file of a candidate."""
    return build / FOLDER / f"{name}.json"


def add_likeness(findings: CandidateFindings, reference: Evidence, product: ImagesProduct, build: Path) -> None:
    """Give every case of a candidate its likeness, or refuse the candidate; a release from before it has none."""
    assert findings.evidence is not None
    name = findings.evidence.candidate.name
    if name == product.reference:
        if any(locate_likeness(build, other).is_file() for other in product.candidates):
            _score_reference(findings.evidence)
        return
    path = locate_likeness(build, name)
    if not path.is_file():
        if any(f"{eval_name}/{LIKENESS.name}" in product.gate.tolerances for eval_name in product.evals):
            findings.refusals.append(
                f"{path}: expected how alike the pictures are to the reference's, found no file; run `dvc repro`"
            )
        return
    try:
        likeness = read_record(path, Likeness)
        if likeness.name != name or likeness.refusal is not None:
            raise EvidenceError(
                f"likeness of {name}: {likeness.refusal or f'{path} is of {likeness.name!r}; run `dvc repro`'}"
            )
        _score_candidate(findings.evidence, reference, likeness, path)
        for eval_name in findings.evidence.records:
            tolerance = product.gate.tolerances.get(f"{eval_name}/{LIKENESS.name}", Tolerance())
            _check_floor(read_floor(reference, eval_name), tolerance, where=f"{eval_name}/{LIKENESS.name}")
    except EvidenceError as error:
        findings.refusals.append(str(error))


def _score_reference(evidence: Evidence) -> None:
    for eval_name, table in evidence.records.items():
        evidence.records[eval_name] = table.with_score(LIKENESS_SCORE, [1.0] * len(table))


def _score_candidate(evidence: Evidence, reference: Evidence, likeness: Likeness, path: Path) -> None:
    for eval_name, table in evidence.records.items():
        if eval_name in reference.records:  # else it is refused for that
            rows = {row.case_id: row for row in likeness.evals.get(eval_name, ())}
            scores = _match(rows, table, reference.records[eval_name], where=f"{path}: {eval_name}")
            evidence.records[eval_name] = table.with_score(LIKENESS_SCORE, scores)


def _match(rows: dict[str, PictureLikeness], table: CaseTable, reference: CaseTable, *, where: str) -> list[float]:
    """Return the likeness of each case, which has to be that of the very pictures that were judged."""
    originals = {record.case_id: name_picture(record.output) for record in reference}
    scores = []
    for record in table:
        if (row := rows.get(record.case_id)) is None:
            raise EvidenceError(
                f"{where}: expected the likeness of case {record.case_id!r}, found none; run `dvc repro`"
            )
        pictures = (originals.get(row.case_id, row.reference), name_picture(record.output))
        if (row.reference, row.candidate) != pictures:
            raise EvidenceError(
                f"{where}: case {row.case_id!r}: expected the likeness of the pictures that were judged "
                f"({' and '.join(pictures)}), found that of {row.reference} and {row.candidate}; run `dvc repro`"
            )
        scores.append(row.ssim)
    return scores


def _check_floor(floor: Mapping[str, float], tolerance: Tolerance, *, where: str) -> None:
    """Refuse a tolerance that would let through pictures which have only the prompt in common with the reference's."""
    if not floor or tolerance.overall is None or tolerance.tier == "advisory":
        return
    lost = 1 - fmean(floor.values())
    if tolerance.overall >= lost:
        raise EvidenceError(
            f"{where}: expected a tolerance below {lost:.4g}, got {tolerance.overall:g}: the reference itself loses "
            f"{lost:.4g} by another seed, so other pictures would pass; lower it, or set `tier: advisory`"
        )


def read_floor(reference: Evidence, eval_name: str) -> dict[str, float]:
    """Return by case how alike the reference's pictures are where only the seed differs; nothing in older records."""
    return dict(read_notes(reference, eval_name).get("other_seed_ssim", {}))
