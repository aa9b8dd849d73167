"""What a bundle keeps of the records: enough to judge again, without a text that a case asked or that was answered.

The layout is that of build/, with the released candidates and the reference alone. A case keeps its id, the digest of
its input, cluster, buckets, scores and counts; its prompt goes, and of its output each line becomes a short digest, so
that the gate still sees which outputs are empty, differ, or have how many turns. Kept whole: the index of each
evaluation (with the digests of the original records), the canary with its answers, notes, benchmarks, matched
detections. Left out: the top tokens of perplexity, which are megabytes and feed tripwires only.
"""

from __future__ import annotations

import gzip
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.products import find_eval_kind
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import OUTGROWN, CaseRecord, EvalFile, Evaluation, read_cases
from pipeline.records.files import check_size, write_bytes, write_text
from pipeline.records.kept_outputs import shorten_line
from pipeline.records.record_files import read_record, write_cases, write_record

PACKED = ".gz"
_RECORDS = ("candidates", "evaluations", "benchmarks")  # folders of build/


def keep_records(build: Path, names: Iterable[str], folder: Path) -> None:
    """Write what is kept of some candidates' records.

    Args:
        build: folder of a product's results.
        names: of candidates, the reference among them.
        folder: where to write.

    Raises:
        EvidenceError: records are missing or damaged.
    """
    for name in names:
        _copy(build, folder, Path("candidates", name, "candidate.json"))
        if (build / "benchmarks" / f"{name}.json").is_file():
            _copy(build, folder, Path("benchmarks", f"{name}.json"))
        place = Path("evaluations", name)
        evaluation = read_record(build / place / "evaluation.json", Evaluation)
        whole = ["evaluation.json", *(f"config/{file}" for file in evaluation.config)]
        for eval_name, file in evaluation.evals.items():
            records = [_strip(record) for record in read_cases(build / place / file.records)]
            write_cases(folder / place / file.records, records)
            _pack(folder / place / file.records)
            whole += [f"{eval_name}.json"] if file.notes_sha256 else []
            whole += [f"{eval_name}.npz"] if _find_kept_arrays(file) else []
        for file_name in whole:
            _copy(build, folder, place / file_name)
        if evaluation.canary is not None:
            _copy(build, folder, place / evaluation.canary.records)
            _pack(folder / place / evaluation.canary.records)


def restore_records(folder: Path, build: Path) -> None:
    """Lay kept records out as the gate reads them, sealed anew as what they are now.

    Args:
        folder: with what `keep_records` wrote.
        build: where to write; the folder is not there yet.

    Raises:
        EvidenceError: a file is damaged or missing.
    """
    for part in _RECORDS:
        if (folder / part).is_dir():
            shutil.copytree(folder / part, build / part)
    for path in sorted(build.rglob(f"*{PACKED}")):
        try:
            write_text(path.with_suffix(""), _unpack(path).decode("utf-8"))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise EvidenceError(
                f"{folder / path.relative_to(build)}: expected packed records, got "
                f"{type(error).__name__} while unpacking them"
            ) from None
    for path in sorted(build.glob("evaluations/*/evaluation.json")):
        _seal(path)


def _unpack(path: Path) -> bytes:
    """Return what was packed, a piece at a time: a small file may unpack to more than fits into memory."""
    found = bytearray()
    with gzip.open(path) as file:
        while piece := file.read(1 << 20):
            found += piece
            check_size(len(found), f"{path.name}: unpacked")
    return bytes(found)


def _seal(index: Path) -> None:
    evaluation = read_record(index, Evaluation)
    _check_inside(index, evaluation)
    evals = {}
    for eval_name, file in evaluation.evals.items():
        records = index.parent / file.records
        if not records.is_file():
            raise EvidenceError(f"{eval_name} of {evaluation.candidate}: expected its records, found none")
        evals[eval_name] = file.model_copy(
            update={"sha256": digest_file(records), "arrays_sha256": _find_kept_arrays(file)}
        )
    write_record(index, evaluation.model_copy(update={"evals": evals}))


def _find_kept_arrays(file: EvalFile) -> str | None:
    """Return the digest of an eval's arrays where a verdict is computed from them; None where they are left out."""
    settings = find_eval_kind(file.kind)
    return file.arrays_sha256 if settings and settings.keeps_arrays else None


def _check_inside(index: Path, evaluation: Evaluation) -> None:
    """Refuse an index that names files elsewhere: what is wrong with them would be told with their words."""
    names = [
        *evaluation.evals,
        *evaluation.config,
        *(file.records for file in evaluation.evals.values()),
        *([evaluation.canary.records] if evaluation.canary else []),
    ]
    if outside := next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None):
        raise EvidenceError(
            f"{Path(*index.parts[-3:])}: expected names of files beside it, got {outside!r}; take the "
            "bundle from git again"
        )


def _strip(record: CaseRecord) -> CaseRecord:
    lines = [_strip_line(line) for line in record.output.split("\n")]
    return record.model_copy(update={"prompt": "", "output": "\n".join(lines), "latency_s": 0.0})


def _strip_line(line: str) -> str:
    if line.endswith(OUTGROWN):
        return OUTGROWN
    return shorten_line(line) if line.strip() else line


def _copy(build: Path, folder: Path, name: Path) -> None:
    if not (build / name).is_file():
        raise EvidenceError(f"{build / name}: expected a file for the release bundle, found none; run `dvc repro`")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(build / name, folder / name)


def _pack(path: Path) -> None:
    """Compress a file; equal content gives equal bytes."""
    write_bytes(path.with_name(path.name + PACKED), gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
