"""quantgate's own case records, `build/<product>/evaluations/<candidate>/<eval>.jsonl`: to judge them without DVC.

Where the evaluation's index lies beside them, the file must be the one that it names, byte for byte, and the two sides
must have answered one evalset, asked and scored alike. Fingerprints, canary and weights are `quantgate gate`'s matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.outcomes.cases import Grouping, Outcomes
from pipeline.outcomes.questions import identify_prompt
from pipeline.outcomes.reading import read_first_keys
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import Evaluation, format_failures, read_cases
from pipeline.records.record_files import read_record

FORMAT = "case_records"
INDEX = "evaluation.json"


def recognizes(path: Path) -> bool:
    """Say whether the first line of a JSONL file looks like a case record."""
    return path.suffix.lower() == ".jsonl" and {"input_digest", "scores", "fingerprint"} <= read_first_keys(path)


def list_files(folder: Path) -> Iterator[Path]:
    """Yield the records that a folder's index names."""
    yield from (folder / file.records for file in read_record(folder / INDEX, Evaluation).evals.values())


def list_sealed(folder: Path) -> Iterator[Path]:
    """Yield what an evaluation keeps beside its records: arrays and notes, the canary, the server's settings."""
    index = read_record(folder / INDEX, Evaluation)
    for file in index.evals.values():
        yield from ((folder / file.records).with_suffix(suffix) for suffix in (".npz", ".json"))
    yield from (folder / "config" / name for name in index.config)
    yield from (folder / index.canary.records,) if index.canary else ()


def read(path: Path, grouping: Grouping) -> Outcomes:
    """Read the records of one eval.

    Raises:
        EvidenceError: they are malformed, were edited, or hold a case twice or without a judgement.
    """
    if grouping != Grouping():
        raise EvidenceError(
            f"{path}: quantgate's own records know their clusters and buckets; they can't be grouped by another field"
        )
    records = read_cases(path)
    if problem := format_failures(records):
        raise EvidenceError(f"{path}: {problem}")
    first: dict[str, str] = {}
    for record in records:
        if record.input_digest in first:
            raise EvidenceError(
                f"{path}: case {record.case_id!r} asks the same as case "
                f"{first[record.input_digest]!r}; every case may count once"
            )
        first[record.input_digest] = record.case_id
    asked = {record.case_id: {"question": record.input_digest} for record in records}
    questions = [identify_prompt(record.prompt) for record in records]
    return Outcomes(path.stem, path, FORMAT, records, _read_index(path), asked, questions, {})


def _read_index(path: Path) -> dict[str, str]:
    """Check the records against the index beside them, and return what both sides must share."""
    index = path.with_name(INDEX)
    evals = read_record(index, Evaluation).evals if index.is_file() else {}
    if (file := evals.get(path.stem)) is None or file.records != path.name:
        return {}
    if digest_file(path) != file.sha256:
        raise EvidenceError(
            f"{path}: expected sha256 {file.sha256[:12]}, as {index} says; the records were edited or "
            "cut after they were written"
        )
    return {"evalset": file.evalset_digest, "settings and code": file.key}
