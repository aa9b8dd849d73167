"""What lm-eval tasks ask, remembered: loading one takes seconds of imports, and stage `env` runs every time.

A task is remembered only when it has no code and all that was read for it lies in its folder. Then the digests of the
folder, the settings and the libraries stand for whatever it asks. Any other task is loaded anew each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError
from pipeline.evalsets.cards import NOTES
from pipeline.products.text.evals import material
from pipeline.products.text.settings import HarnessEval, TextProduct
from pipeline.records.digests import digest_file, digest_folder, digest_json
from pipeline.records.files import write_text
from pipeline.records.record_files import Record
from pipeline.running.environment import read_libraries
from pipeline.settings.base import ENV

MEMORY = ENV / "tasks.json"  # by a digest of what a task's content follows from, what is known of it
_READS = ("open", "os.scandir", "glob.glob")  # Python's own names of these events
_SYSTEM = ("/proc", "/sys", "/dev/null", "/dev/urandom")  # that libraries look at while they start
_listeners: list[Callable[[str], None]] = []


class KnownTask(Record):
    """What is known of a task, see `material.Task`; documents by their clusters and buckets."""

    digest: str
    is_answered_in_words: bool
    documents: tuple[tuple[str, tuple[str, ...]], ...]
    longest_scored: tuple[tuple[str, str], ...]


def digest_evalsets(product: TextProduct, root: Path) -> dict[str, str]:
    """Return the digest of what each eval asks: DVC watches these.

    Raises:
        SettingsError: a task that can't be loaded.
    """
    tasks = describe_tasks(product, root)
    return {
        name: tasks[name].digest
        if isinstance(settings, HarnessEval)
        else digest_folder(root / settings.evalset, ignore=NOTES)
        for name, settings in product.evals.items()
    }


def describe_tasks(product: TextProduct, root: Path) -> dict[str, KnownTask]:
    """Return what is known of each lm-eval task of a product, by eval.

    Raises:
        SettingsError: a task that can't be loaded.
    """
    try:
        return {name: describe_task(name, settings, root) for name, settings in product.task_evals.items()}
    except SettingsError as error:
        raise SettingsError(product.locate(str(error))) from error


def describe_task(name: str, settings: HarnessEval, root: Path) -> KnownTask:
    """Return what is known of a task, without loading it where that was done before.

    Args:
        name: of the eval.
        settings: its task, whose paths start at the current folder.
        root: of the project.

    Raises:
        SettingsError: the task can't be loaded.
    """
    if settings.include_path is None or not Path(settings.include_path).is_dir():
        return _describe_builtin(name, settings)
    folder = Path(settings.include_path).resolve()
    key = _digest_sources(settings, folder)
    memory = _read_memory(root / MEMORY)
    if key in memory:
        return KnownTask.model_validate(memory[key])
    with _watch_reads() as reads:
        known = _load(name, settings)
    # a file that is gone was a temporary one
    if all(path.is_relative_to(folder) and path.suffix != ".py" for path in reads if path.exists()):
        write_text(root / MEMORY, json.dumps(memory | {key: known.model_dump()}) + "\n")
    return known


@cache
def _describe_builtin(name: str, settings: HarnessEval) -> KnownTask:
    return _load(name, settings)  # what is installed does not change while the program runs


def _load(name: str, settings: HarnessEval) -> KnownTask:
    task = material.load_task(name, settings)
    return KnownTask(
        digest=task.digest,
        is_answered_in_words=bool(task.questions),
        documents=task.documents,
        longest_scored=task.longest_scored,
    )


def _digest_sources(settings: HarnessEval, folder: Path) -> str:
    """Return the digest of all that a task in its folder follows from, the code that loads it among them."""
    code = [digest_file(Path(file)) for file in (__file__, material.__file__)]
    asked = settings.model_dump(mode="json")
    return digest_json([asked, digest_folder(folder), code, read_libraries()])


def _read_memory(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}  # then the tasks are loaded


@contextlib.contextmanager
def _watch_reads() -> Iterator[set[Path]]:
    """Collect the files that are opened and the folders that are searched, less those of Python and the system.

    Where modules are imported from, what is installed is searched for by `imports.py`: whatever is read there counts.
    """
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    aside = (*installed, Path("/usr/share/zoneinfo"), *map(Path, _SYSTEM))
    sources, reads = {Path(os.path.realpath(entry)) for entry in sys.path}, set[Path]()

    def note(name: str) -> None:
        path = Path(os.path.realpath(name))
        if path not in sources and not any(path.is_relative_to(folder) for folder in aside):
            reads.add(path)

    if not _listeners:
        sys.addaudithook(_hear)
    _listeners.append(note)
    try:
        yield reads
    finally:
        _listeners.remove(note)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Tell the listeners of a read; Python never takes a hook back, and without listeners it costs next to nothing."""
    if _listeners and event in _READS and isinstance(arguments[0], str | bytes | os.PathLike):
        for listen in tuple(_listeners):
            listen(os.fsdecode(arguments[0]))
