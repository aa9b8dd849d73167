"""Logs of inspect_ai, `.eval` (a zip of JSON files) and `.json`, read without inspect_ai.

A case is a sample in an epoch; the epochs of a sample are one cluster. Each scorer is a score; one that gives several
values by name gives `<scorer>.<name>`. "C", "P", "I" and "N" count as 1, 0.5, 0 and 0, as in inspect_ai's own accuracy.
A log that did not end in success, that somebody marked as invalid or that holds fewer samples than it says is refused.
Both sides must have run the same task with the same arguments, solvers, scorers and generation settings.

Not covered: scores that were edited by hand are taken as they are; which direction is better is not in a log.
`.eval` files are compressed by Zstandard, which Python reads from 3.14 on; before, pyarrow does.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.outcomes.cases import Case, Grouping, Outcomes, build_outcomes, parse_json

FORMAT = "inspect_ai"
_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ZSTANDARD = 93  # a zip's number of that compression
_LOCAL_HEADER_BYTES = 30  # of a file in a zip, before its name
# settings of a run that change no answer
_TRANSPORT = {"max_connections", "adaptive_connections", "max_retries", "timeout", "attempt_timeout", "batch"}


def recognizes(path: Path) -> bool:
    """Say whether a file looks like a log: an `.eval`, or a `.json` that starts as one does."""
    if path.suffix == ".json":
        with path.open("rb") as file:
            start = file.read(4096)
        return re.search(rb'"status":', start) is not None and re.search(rb'"eval":', start) is not None
    return path.suffix == ".eval"


def list_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that are of this format."""
    yield from (path for path in sorted(folder.rglob("*")) if path.suffix in (".eval", ".json") and recognizes(path))


def read(path: Path, grouping: Grouping) -> Outcomes:
    """Read one log.

    Raises:
        EvidenceError: it is damaged, did not end in success, or lacks samples.
    """
    log, samples = _read_zip(path) if path.suffix == ".eval" else _read_json(path)
    _check_complete(log, len(samples), path)
    about = log["eval"]
    cases = [_read_case(sample, f"{path}: sample {i}") for i, sample in enumerate(samples, start=1)]
    return build_outcomes(str(about.get("task", path.stem)).rpartition("/")[2], path, cases, format=FORMAT,
                          grouping=grouping, task=_describe_task(log))


def _read_json(path: Path) -> tuple[dict[str, Any], list[Any]]:
    log = parse_json(path.read_bytes(), str(path))
    _check_shape(log, path)
    return log, log.get("samples") or []


def _read_zip(path: Path) -> tuple[dict[str, Any], list[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json")]
            if "header.json" not in archive.namelist():
                raise EvidenceError(f"{path}: expected a log that has ended, found no header.json in it: the run is "
                                    "under way or was killed")
            log = parse_json(_extract(archive, "header.json", path), f"{path}: header.json")
            samples = [parse_json(_extract(archive, name, path), f"{path}: {name}") for name in names]
    except zipfile.BadZipFile as error:
        raise EvidenceError(f"{path}: expected a log of inspect_ai, which is a zip file, got something else: {error}; "
                            "was it cut off?") from None
    _check_shape(log, path)
    return log, samples


def _extract(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """Return a file of a zip; one compressed by Zstandard through pyarrow where zipfile does not know it."""
    try:
        return archive.read(name)
    except NotImplementedError:
        info = archive.getinfo(name)
        if info.compress_type != _ZSTANDARD:
            raise EvidenceError(f"{path}: {name}: compressed by method {info.compress_type}, which can't be read; "
                                "`inspect log convert --to json` makes a log that can") from None
    try:
        import pyarrow
    except ImportError:
        raise EvidenceError(f"{path}: compressed by Zstandard, which Python reads from 3.14 on: `pip install pyarrow`, "
                            "or turn the log into JSON with `inspect log convert --to json`") from None
    try:
        with path.open("rb") as file:
            file.seek(info.header_offset + _LOCAL_HEADER_BYTES - 4)
            lengths = file.read(4)  # of the name and of the extra field behind it
            file.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), 1)
            packed = file.read(info.compress_size)
        plain: bytes = pyarrow.decompress(packed, decompressed_size=info.file_size, codec="zstd", asbytes=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise EvidenceError(f"{path}: {name}: expected data compressed by Zstandard, got something else: "
                            f"{' '.join(str(error).split())}") from None
    if zlib.crc32(plain) != info.CRC:
        raise EvidenceError(f"{path}: {name}: its checksum is wrong; the log was damaged or edited")
    return plain


def _check_shape(log: Any, path: Path) -> None:
    if not isinstance(log, dict) or not isinstance(log.get("eval"), dict) or "status" not in log:
        raise EvidenceError(f"{path}: expected a log of inspect_ai with `status` and `eval`, got something else")


def _check_complete(log: dict[str, Any], num_samples: int, path: Path) -> None:
    """Refuse a log that does not hold the whole run."""
    if log["status"] != "success":
        error = log.get("error")
        why = error.get("message") if isinstance(error, dict) else None
        raise EvidenceError(f"{path}: expected a run that ended in success, got status {log['status']!r}"
                            + (f" ({' '.join(str(why).split())[:200]})" if why else "")
                            + "; `inspect eval-retry` finishes it")
    if log.get("invalidated"):
        raise EvidenceError(f"{path}: the log is marked as invalid")
    results = log.get("results")
    asked = results.get("total_samples") if isinstance(results, dict) else None
    if asked is not None and asked != num_samples:
        raise EvidenceError(f"{path}: expected {asked} samples, as the log says, got {num_samples}; run the task with "
                            "log_samples on")


def _describe_task(log: dict[str, Any]) -> dict[str, Any]:
    """Return what both sides must share."""
    about, plan = log["eval"], log.get("plan") or {}
    settings = {**(plan.get("config") or {}), **(about.get("model_generate_config") or {})}
    return {
        "task": about.get("task"), "version": about.get("task_version"), "arguments": about.get("task_args"),
        "solvers": [[step.get("solver"), step.get("params")] for step in plan.get("steps") or []],
        "scorers": [[scorer.get("name"), scorer.get("options")] for scorer in about.get("scorers") or []],
        "generation": {key: value for key, value in settings.items() if key not in _TRANSPORT},
    }


def _read_case(sample: Any, where: str) -> Case:
    if not isinstance(sample, dict) or not {"id", "epoch", "input", "target"} <= sample.keys():
        raise EvidenceError(f"{where}: expected id, epoch, input and target, got something else")
    error, output = sample.get("error"), sample.get("output")
    failure = None
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        failure = f"infrastructure: {message}"
    asked = {"id": sample["id"], "epoch": sample["epoch"], "input": _strip(sample["input"]),
             "target": sample["target"], "choices": sample.get("choices")}
    metadata = sample.get("metadata")
    name = str(sample["id"])
    return Case(
        name if sample["epoch"] == 1 else f"{name} (epoch {sample['epoch']})", where, asked,
        _read_scores(sample.get("scores")), cluster=name, prompt=_show_input(sample["input"]), failure=failure,
        output=str(output.get("completion", "")) if isinstance(output, dict) else "",
        fields=metadata if isinstance(metadata, dict) else {})


def _read_scores(scores: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scorer, score in (scores.items() if isinstance(scores, dict) else ()):
        value = score.get("value") if isinstance(score, dict) else None
        if isinstance(value, dict):
            found |= {f"{scorer}.{key}": _read_value(part) for key, part in value.items()}
        else:
            found[scorer] = _read_value(value)
    return found


def _read_value(value: Any) -> Any:
    if isinstance(value, str):
        return _LETTERS.get(value, _LETTERS.get(value.lower() if len(value) > 1 else value, value))
    return value


def _strip(given: Any) -> Any:
    """Leave out the ids of messages, which are drawn anew in each run."""
    if isinstance(given, list):
        return [{key: value for key, value in m.items() if key != "id"} if isinstance(m, dict) else m for m in given]
    return given


def _show_input(given: Any) -> str:
    if isinstance(given, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in given if isinstance(m, dict))
    return str(given)
