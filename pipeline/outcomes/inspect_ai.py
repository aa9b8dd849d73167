"""Logs of inspect_ai, `.eval` (a zip of JSON files) and `.json`, read without inspect_ai.

A case is a sample in an epoch; the epochs of a sample are one cluster, and so are samples of one input, one set of
choices, files, setup and sandbox. Each scorer is a score; one that gives several values by name gives
`<scorer>.<name>`. "C", "P", "I" and "N" count as 1, 0.5, 0 and 0, as in inspect_ai's own accuracy.
A log that did not end in success, that somebody marked as invalid or that holds fewer samples than it says is refused.
Both sides must have run the same task with the same arguments, solvers, scorers, generation settings, limits of work,
sandbox, approval policy and other models (a grader).

Not covered: scores that were edited by hand are taken as they are; which direction is better is not in a log.
`.eval` files are compressed by Zstandard, which Python reads from 3.14 on; before, pyarrow does.
"""

from __future__ import annotations

import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.outcomes.cases import Case, Grouping, Outcomes, build_outcomes, condense_case
from pipeline.outcomes.reading import parse_json
from pipeline.records.files import check_size, open_bounded, read_bounded

FORMAT = "inspect_ai"
_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ZSTANDARD = 93  # a zip's number of that compression
_ENCRYPTED = 1  # flag of a file in a zip
_LOCAL_HEADER_BYTES = 30  # of a file in a zip, before its name
_LIMITS = ("message_limit", "token_limit", "time_limit", "working_limit", "cost_limit")  # of a sample's work
# settings of a run that change no answer
_TRANSPORT = {"max_connections", "adaptive_connections", "max_retries", "timeout", "attempt_timeout", "batch"}

_EVAL_SET = ".eval-set-id"  # marks a folder of `inspect eval-set`
_LISTS = {_EVAL_SET, "eval-set.json", "logs.json"}  # what it keeps there of its logs


def recognizes(path: Path) -> bool:
    """Say whether a file looks like a log: an `.eval`, or a `.json` that starts as one does."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        with open_bounded(path) as file:
            start = file.read(4096)
        return re.search(rb'"status"\s*:', start) is not None and re.search(rb'"eval"\s*:', start) is not None
    return suffix == ".eval"


def is_beside_logs(path: Path) -> bool:
    """Say by a file's name whether `inspect eval-set` keeps it of its logs; elsewhere a log may bear such a name."""
    return path.name in _LISTS and path.with_name(_EVAL_SET).is_file()


def read(path: Path, grouping: Grouping) -> Outcomes:
    """Read one log.

    Raises:
        EvidenceError: it is damaged, did not end in success, or lacks samples.
    """
    log, num_samples, samples = _read_zip(path) if path.suffix.lower() == ".eval" else _read_json(path)
    _check_complete(log, num_samples, path)
    about = log["eval"]
    cases = [
        condense_case(_read_case(sample, f"{path}: sample {i}"), grouping) for i, sample in enumerate(samples, start=1)
    ]
    return build_outcomes(
        str(about.get("task", path.stem)).rpartition("/")[2], path, cases, format=FORMAT, task=_describe_task(log)
    )


def _read_json(path: Path) -> tuple[dict[str, Any], int, Iterable[Any]]:
    log = parse_json(read_bounded(path), str(path))
    _check_shape(log, path)
    samples = log.get("samples") or []
    if not isinstance(samples, list):
        raise EvidenceError(f"{path}: expected a list of samples, got {type(samples).__name__}")
    return log, len(samples), samples


def _read_zip(path: Path) -> tuple[dict[str, Any], int, Iterable[Any]]:
    """Return the log, how many samples it has, and the samples, each read when it is its turn."""
    with _open_archive(path) as archive:
        names = [name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json")]
        if "header.json" not in archive.namelist():
            raise EvidenceError(
                f"{path}: expected a log that has ended, found no header.json in it: the run is under way or was killed"
            )
        log = parse_json(_extract(archive, "header.json", path), f"{path}: header.json")
    _check_shape(log, path)
    return log, len(names), _iterate_samples(path, names)


def _iterate_samples(path: Path, names: Iterable[str]) -> Iterator[Any]:
    with _open_archive(path) as archive:
        for name in names:
            yield parse_json(_extract(archive, name, path), f"{path}: {name}")


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip whose files are there once, unpack to what there is memory for, and are not encrypted.

    Raises:
        EvidenceError: they are not, or what is read within is damaged.
    """
    try:
        with open_bounded(path) as file, zipfile.ZipFile(file) as archive:
            names = Counter(archive.namelist())
            if twice := next((name for name, count in names.items() if count > 1), None):
                raise EvidenceError(f"{path}: {twice[:100]!r} is there twice in it; a log holds each file once")
            if any(info.flag_bits & _ENCRYPTED for info in archive.infolist()):
                raise EvidenceError(f"{path}: it is encrypted; unpack it with its password and give the log as JSON")
            check_size(sum(info.file_size for info in archive.infolist()), f"{path}: unpacked")
            yield archive
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, NotImplementedError) as error:
        raise EvidenceError(
            f"{path}: expected a log of inspect_ai, which is a zip file, got something else: "
            f"{' '.join(str(error).split())}; was it cut off?"
        ) from None


def _extract(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """Return a file of a zip; one compressed by Zstandard through pyarrow where zipfile does not know it."""
    try:
        return archive.read(name)
    except NotImplementedError:
        info = archive.getinfo(name)
        if info.compress_type != _ZSTANDARD:
            raise EvidenceError(
                f"{path}: {name}: compressed by method {info.compress_type}, which can't be read; "
                "`inspect log convert --to json` makes a log that can"
            ) from None
    try:
        import pyarrow
    except ImportError:
        raise EvidenceError(
            f"{path}: compressed by Zstandard, which Python reads from 3.14 on: `pip install pyarrow`, "
            "or turn the log into JSON with `inspect log convert --to json`"
        ) from None
    try:
        with path.open("rb") as file:
            file.seek(info.header_offset + _LOCAL_HEADER_BYTES - 4)
            lengths = file.read(4)  # of the name and of the extra field behind it
            file.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), 1)
            packed = file.read(info.compress_size)
        plain: bytes = pyarrow.decompress(packed, decompressed_size=info.file_size, codec="zstd", asbytes=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise EvidenceError(
            f"{path}: {name}: expected data compressed by Zstandard, got something else: {' '.join(str(error).split())}"
        ) from None
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
        raise EvidenceError(
            f"{path}: expected a run that ended in success, got status {log['status']!r}"
            + (f" ({' '.join(str(why).split())[:200]})" if why else "")
            + "; `inspect eval-retry` finishes it"
        )
    if log.get("invalidated"):
        raise EvidenceError(f"{path}: the log is marked as invalid")
    results = log.get("results")
    asked = results.get("total_samples") if isinstance(results, dict) else None
    if asked is not None and asked != num_samples:
        raise EvidenceError(
            f"{path}: expected {asked} samples, as the log says, got {num_samples}; run the task with log_samples on"
        )


def _describe_task(log: dict[str, Any]) -> dict[str, Any]:
    """Return what both sides must share."""
    about, plan = log["eval"], _take_object(log, "plan")
    settings = {**_take_object(plan, "config"), **_take_object(about, "model_generate_config")}
    return {
        "task": about.get("task"),
        "version": about.get("task_version"),
        "arguments": about.get("task_args"),
        "solvers": [[step.get("solver"), step.get("params")] for step in _list_objects(plan, "steps")],
        "scorers": [[scorer.get("name"), scorer.get("options")] for scorer in _list_objects(about, "scorers")],
        "limits": {key: given for key in _LIMITS if (given := _take_object(about, "config").get(key)) is not None},
        "other models": _describe_roles(about),
        "sandbox": _describe_sandbox(about.get("sandbox")),
        "approval": _take_object(about, "config").get("approval"),
        "generation": {key: value for key, value in settings.items() if key not in _TRANSPORT},
    }


def _describe_roles(about: dict[str, Any]) -> dict[str, Any]:
    """Return which models have a part beside the one that is evaluated, such as a grader."""
    roles = {
        role: found.get("model") if isinstance(found, dict) else found
        for role, found in _take_object(about, "model_roles").items()
    }
    return {role: "itself" if model == about.get("model") else model for role, model in roles.items()}


def _describe_sandbox(sandbox: Any) -> Any:
    """Return what a sandbox is, with the names of its files, wherever they lie."""
    if isinstance(sandbox, dict):
        return {key: _describe_sandbox(part) for key, part in sandbox.items()}
    return PurePath(sandbox).name if isinstance(sandbox, str) else sandbox


def _take_object(section: dict[str, Any], key: str) -> dict[str, Any]:
    found = section.get(key)
    return found if isinstance(found, dict) else {}


def _list_objects(section: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = section.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _read_case(sample: Any, where: str) -> Case:
    if not isinstance(sample, dict) or not {"id", "epoch", "input", "target"} <= sample.keys():
        raise EvidenceError(f"{where}: expected id, epoch, input and target, got something else")
    error, output = sample.get("error"), sample.get("output")
    failure = None
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        failure = f"infrastructure: {message}"
    asked = {
        "id": sample["id"],
        "epoch": sample["epoch"],
        "input": _strip(sample["input"]),
        "target": sample["target"],
        "choices": sample.get("choices"),
    }
    asked |= {part: sample[part] for part in ("files", "setup") if sample.get(part)}
    asked |= {"sandbox": _describe_sandbox(sample["sandbox"])} if sample.get("sandbox") else {}
    metadata = sample.get("metadata")
    name = str(sample["id"])
    return Case(
        name if sample["epoch"] == 1 else f"{name} (epoch {sample['epoch']})",
        where,
        asked,
        _read_scores(sample.get("scores")),
        cluster=name,
        tells=(("id",), tuple(part for part in ("input", "choices", "files", "setup", "sandbox") if part in asked)),
        prompt=_show_input(sample["input"]),
        failure=failure,
        num_choices=_count_choices(sample),
        output=str(output.get("completion", "")) if isinstance(output, dict) else "",
        fields=metadata if isinstance(metadata, dict) else {},
    )


def _count_choices(sample: dict[str, Any]) -> int:
    """Return how many choices a question gives of which one is right; 0: its answer is free, or several letters."""
    choices, target = sample.get("choices"), sample["target"]
    letters = "".join(map(str, target if isinstance(target, list) else [target]))
    return len(choices) if isinstance(choices, list) and len(choices) > 1 and len(letters) == 1 else 0


def _read_scores(scores: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scorer, score in scores.items() if isinstance(scores, dict) else ():
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
