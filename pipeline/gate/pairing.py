"""Is the evidence fit to be judged? Load two candidates' records, check them, pair them.

Everything that would make a comparison meaningless is refused here, with the name of the thing:
records that were edited after they were written, that answer for another candidate than the one
that would ship, that are missing, duplicated, unmatched, failed or empty. What passes comes out as
aligned lists. No statistics here; a regression is not a problem of evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.gate.case_rows import parse_rows
from pipeline.gate.case_table import CaseTable
from pipeline.records.detections import MatchTable, load_matches
from pipeline.records.digests import digest_bytes
from pipeline.records.evaluations import (
    Candidate,
    CaseRecord,
    EvalFile,
    Evaluation,
    LocalCandidate,
    format_failures,
    read_cases,
)
from pipeline.records.fingerprints import Difference, find_difference, fingerprint
from pipeline.records.record_files import read_record
from pipeline.settings.base import Eval

AnyCandidate = Candidate | LocalCandidate


@dataclass(frozen=True)
class Evidence:
    """What one candidate brings to the gate: its records, or why an eval's records are unfit.

    Attributes:
        fingerprint: of what was evaluated, which was checked to be what would ship.
        records: per eval, in evalset order; only evals that are fit.
        problems: per eval that is unfit, the reason in one line.
        tables: per eval of a detector that is fit, its matched detections, in the order of the records.
    """

    candidate: AnyCandidate
    fingerprint: str
    folder: Path
    evaluation: Evaluation
    records: dict[str, CaseTable]
    problems: dict[str, str]
    tables: dict[str, MatchTable]


@dataclass(frozen=True)
class PairedCases:
    """The cases of one eval, reference and candidate side by side.

    Attributes:
        reference: records of the reference, in evalset order.
        candidate: records of the candidate, the i-th answering the same case.
        candidate_order: position of each in the candidate's own file, for arrays kept beside it.
        clusters: cluster number per case, 0-based.
        tables: matched detections of both, in the order of the cases; None where there are none.
    """

    reference: Sequence[CaseRecord]
    candidate: Sequence[CaseRecord]
    candidate_order: NDArray[np.int64]
    clusters: NDArray[np.int64]
    tables: tuple[MatchTable, MatchTable] | None = None


def load_evidence(
    build: Path, candidate: AnyCandidate, evals: Mapping[str, Eval], *, is_pinned: bool = False
) -> Evidence:
    """Load and check the records of one candidate.

    Args:
        build: the folder that holds `evaluations/`.
        candidate: what would ship.
        evals: settings of each that params.yaml asks for.
        is_pinned: keep the records in memory.

    Raises:
        EvidenceError: nothing about this candidate can be judged.
    """
    name = candidate.name
    folder = build / "evaluations" / name
    evaluation = read_record(folder / "evaluation.json", Evaluation)
    _check_identity(candidate, evaluation, folder / "evaluation.json")
    for file, sha256 in evaluation.config.items():
        _read_sealed(folder / "config" / file, sha256, "configuration")
    records: dict[str, CaseTable] = {}
    problems: dict[str, str] = {}
    tables: dict[str, MatchTable] = {}
    for eval_name, settings in evals.items():
        try:
            asked = settings.model_dump(mode="json")
            table = _load_eval(folder, evaluation, eval_name, asked, is_pinned)
            if any(metric.estimator == "average_precision" for metric in settings.metrics):
                tables[eval_name] = _load_table(folder, evaluation.evals[eval_name], table)
            records[eval_name] = table
        except EvidenceError as error:
            problems[eval_name] = f"{eval_name} of {name}: {error}"
    return Evidence(candidate, evaluation.fingerprint, folder, evaluation, records, problems, tables)


def _check_identity(candidate: AnyCandidate, evaluation: Evaluation, path: Path) -> None:
    if evaluation.candidate != candidate.name:
        raise EvidenceError(
            f"{path}: expected the evaluation of {candidate.name!r}, found that of {evaluation.candidate!r}"
        )
    difference = find_difference(candidate.facts, evaluation.served_by)
    if difference is None and fingerprint(evaluation.served_by) != evaluation.fingerprint:
        difference = Difference("fingerprint", fingerprint(evaluation.served_by)[:12], evaluation.fingerprint[:12])
    if difference is not None:
        raise EvidenceError(
            f"{path}: what was evaluated is not what would ship: {difference.field}: expected "
            f"{difference.expected!r}, got {difference.actual!r}; run `dvc repro` to evaluate it again"
        )


def check_same_hardware(reference: Evaluation, candidate: Evaluation) -> None:
    """Refuse a candidate that was evaluated on other hardware than the reference, as far as both tell theirs.

    Raises:
        EvidenceError: names what differs.
    """
    ours, theirs = (
        {"hardware": e.served_by["hardware"]} if "hardware" in e.served_by else {} for e in (reference, candidate)
    )
    if difference := find_difference(ours, theirs):
        raise EvidenceError(
            f"{difference.field}: {reference.candidate} was evaluated on {difference.expected!r}, "
            f"{candidate.candidate} on {difference.actual!r}; sums round otherwise there: run "
            f"`dvc repro -f -s evaluate@{reference.candidate}` to evaluate both on one machine"
        )


def _load_eval(
    folder: Path, evaluation: Evaluation, eval_name: str, settings: dict[str, Any], is_pinned: bool
) -> CaseTable:
    if eval_name not in evaluation.evals:
        raise EvidenceError(f"not evaluated; {folder / 'evaluation.json'} holds {sorted(evaluation.evals)}")
    file = evaluation.evals[eval_name]
    path = folder / file.records
    for key in settings | file.settings:
        asked, found = (side.get(key, "nothing") for side in (settings, file.settings))
        if asked != found and (key in file.settings or asked):  # a setting newer than the records is off in them
            raise EvidenceError(
                f"{path}: evals.{eval_name}.{key}: expected {asked!r}, as params.yaml asks, evaluated "
                f"with {found!r}; run `dvc repro`"
            )
    records = CaseTable(
        lambda: _read_rows(path, file.sha256), pick=lambda i: _read_row(path, file.sha256, i), is_pinned=is_pinned
    )
    arrays = path.with_suffix(".npz")
    if file.arrays_sha256 is not None:
        _read_sealed(arrays, file.arrays_sha256, "arrays")
    if file.notes_sha256 is not None:
        _read_sealed(path.with_suffix(".json"), file.notes_sha256, "notes")
    _check_records(path, records, file, evaluation.fingerprint)
    return records


def _load_table(folder: Path, file: EvalFile, records: CaseTable) -> MatchTable:
    """Load the matched detections beside records, and check that they are of these records in this order."""
    path = (folder / file.records).with_suffix(".npz")
    if file.arrays_sha256 is None:
        raise EvidenceError(
            f"{path}: expected matched detections and their sha256 in the index, found none; run `dvc repro`"
        )
    table = load_matches(path, num_images=len(records))
    counts = records.scores("objects", where=str(path))
    totals = table.num_objects[:, :, list(table.areas).index("all")].sum(axis=1)
    for i in np.flatnonzero(counts != totals)[:1].tolist():
        raise EvidenceError(
            f"{path}: expected {counts[i]:g} objects of case {records[i].case_id!r}, as its record "
            f"says, got {totals[i]}; run `dvc repro`"
        )
    carried = {bucket for record in records for bucket in record.buckets}
    if shared := sorted(carried & (table.areas.keys() | table.categories.keys())):
        raise EvidenceError(f"{path}: {shared[0]!r} is a bucket of images and one of objects; rename one")
    return table


def _read_rows(path: Path, sha256: str) -> list[CaseRecord]:
    rows = parse_rows(_read_sealed(path, sha256, "records"))
    return read_cases(path) if rows is None else rows


def _read_row(path: Path, sha256: str, number: int) -> CaseRecord:
    """Return the record of one line, 0-based, of a file that was read before."""
    lines = _read_sealed(path, sha256, "records").split(b"\n", number + 1)
    return CaseRecord.model_validate_json(lines[number])


def _read_sealed(path: Path, sha256: str, what: str) -> bytes:
    """Return what is in a file, which has to be what was written there."""
    if not path.is_file():
        raise EvidenceError(f"{path}: expected {what}, found no file; run `dvc repro`")
    data = path.read_bytes()
    if (found := digest_bytes(data)) != sha256:
        raise EvidenceError(
            f"{path}: expected sha256 {sha256[:12]}, got {found[:12]}; "
            f"the {what} were edited or cut after they were written"
        )
    return data


def _check_records(path: Path, records: CaseTable, file: EvalFile, fingerprint: str) -> None:
    if len(records) != file.num_cases:
        raise EvidenceError(f"{path}: expected {file.num_cases} cases, got {len(records)}")
    if not records:
        raise EvidenceError(f"{path}: expected at least one case, got none")
    if len(set(records.digests)) != len(records):
        _name_duplicate(path, records)
    strangers = [r for r in records if r.fingerprint != fingerprint]
    if strangers:
        raise EvidenceError(
            f"{path}: {len(strangers)} of {len(records)} cases were answered by another endpoint, "
            f"first {strangers[0].case_id!r}: expected fingerprint {fingerprint[:12]!r}, "
            f"got {strangers[0].fingerprint[:12]!r}"
        )
    if problem := format_failures(records):
        raise EvidenceError(f"{path}: {problem}")


def _name_duplicate(path: Path, records: Iterable[CaseRecord]) -> None:
    first_with: dict[str, str] = {}
    for record in records:
        if record.input_digest in first_with:
            raise EvidenceError(
                f"{path}: case {record.case_id!r} asks the same as case "
                f"{first_with[record.input_digest]!r}; every case may count once"
            )
        first_with[record.input_digest] = record.case_id


def pair_cases(reference: Evidence, candidate: Evidence, eval_name: str) -> PairedCases:
    """Align the records of one eval by what each case asks.

    Raises:
        EvidenceError: the evalsets differ, or a case has no partner.
    """
    ours, theirs = (e.evaluation.evals[eval_name] for e in (reference, candidate))
    if ours.evalset_digest != theirs.evalset_digest:
        raise EvidenceError(
            f"{eval_name}: reference and candidate answered different evalsets "
            f"({ours.evalset_digest[:12]} and {theirs.evalset_digest[:12]}); run `dvc repro` to "
            "evaluate both on one"
        )
    if ours.key != theirs.key:
        raise EvidenceError(
            f"{eval_name}: reference and candidate were asked or scored by different settings or code "
            f"({ours.key[:12]} and {theirs.key[:12]}); run `dvc repro` to evaluate both alike"
        )
    pairs = align(reference.records[eval_name], candidate.records[eval_name], where=eval_name)
    if eval_name not in reference.tables:
        return pairs
    order, theirs_found = pairs.candidate_order, candidate.tables[eval_name]
    if not np.array_equal(order, np.arange(len(order))):
        theirs_found = theirs_found.at(order)
    return replace(pairs, tables=(reference.tables[eval_name], theirs_found))


def align(reference: Sequence[CaseRecord], candidate: Sequence[CaseRecord], *, where: str) -> PairedCases:
    """Pair two lists of records by `input_digest`; the order of either does not matter.

    Raises:
        EvidenceError: a case without partner, or two sides that disagree on cluster or buckets.
    """
    ours, theirs = CaseTable.of(reference), CaseTable.of(candidate)
    if any(len(set(side.digests)) != len(side) for side in (ours, theirs)):
        raise EvidenceError(f"{where}: a case is there twice; every case may count once")
    order = np.arange(len(ours))
    if ours.digests != theirs.digests:
        _check_unmatched(ours, theirs, where)
        position = {digest: i for i, digest in enumerate(theirs.digests)}
        order = np.array([position[digest] for digest in ours.digests], dtype=np.int64)
    partners = theirs.at(order)
    if ours.groups != partners.groups:
        a, b = next(
            (a, b) for a, b in zip(ours, partners, strict=True) if (a.cluster, a.buckets) != (b.cluster, b.buckets)
        )
        raise EvidenceError(
            f"{where}: case {a.case_id!r} is in cluster {a.cluster!r} and buckets {a.buckets!r} on "
            f"the reference's side, in {b.cluster!r} and {b.buckets!r} on the candidate's"
        )
    return PairedCases(ours, partners, order, ours.clusters)


def _check_unmatched(reference: Sequence[CaseRecord], candidate: Sequence[CaseRecord], where: str) -> None:
    for side, mine, other in (("reference", reference, candidate), ("candidate", candidate, reference)):
        known = {r.input_digest for r in other}
        lonely = [r.case_id for r in mine if r.input_digest not in known]
        if lonely:
            raise EvidenceError(f"{where}: {len(lonely)} cases of the {side} have no partner, first {lonely[0]!r}")


def select_bucket(records: Sequence[CaseRecord], bucket: str | None) -> NDArray[np.int64]:
    """Return the positions of a bucket's cases; None selects all."""
    return CaseTable.of(records).locate(bucket)


def read_scores(records: Sequence[CaseRecord], key: str, *, where: str) -> NDArray[np.float64]:
    """Return one score of every record.

    Raises:
        EvidenceError: a record lacks it.
    """
    return CaseTable.of(records).scores(key, where=where)
