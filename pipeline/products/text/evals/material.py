"""What each eval asks, as one digest: DVC watches it, and scores are found again under it alone.

An evalset has its files. An lm-eval task may take its cases from anywhere, so it is loaded as the evaluation loads it.
What counts is what it then asks: every document, its requests with their examples, its target, and the settings. The
files of its folder count too, and the code that it names, with the local modules that this code imports. One made
answer of each task is judged, so that a metric that can't judge it is told before any work.

Not covered: files outside the task's folder that its code reads only to judge an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import heapq
import inspect
import io
import json
import logging
import random
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from pipeline.errors import SettingsError, suggest
from pipeline.evalsets.cards import NOTES
from pipeline.products.text.evals.context import NUM_LONGEST
from pipeline.products.text.evals.generation import (
    GENERATE,
    Question,
    join_repeats,
    list_buckets,
    name_case,
    name_cluster,
    read_question,
)
from pipeline.products.text.evals.imports import list_modules
from pipeline.products.text.evals.task_judges import ACCURACY_METRICS, check_ends, check_judge, explain_problems
from pipeline.products.text.settings import HarnessEval
from pipeline.records.digests import digest_file, digest_folder, digest_json

FEWSHOT_SEED = 1234  # lm-eval's own


@dataclass(frozen=True)
class Task:
    """An lm-eval task, loaded.

    Attributes:
        digest: of what it asks and how it judges.
        questions: the prompts that are answered in words.
        documents: cluster and buckets of each document.
        longest_scored: of the texts that are scored, each a prompt and a given answer, the longest with their cases.
    """

    digest: str
    questions: tuple[Question, ...]
    documents: tuple[tuple[str, tuple[str, ...]], ...]
    longest_scored: tuple[tuple[str, str], ...]


def load_task(name: str, settings: HarnessEval) -> Task:
    """Load an lm-eval task as its evaluation does; its paths start at the current folder.

    Args:
        name: of the eval.
        settings: its task.

    Raises:
        SettingsError: the task or its documents can't be loaded, are not of a kind that has a digest, or the task
            samples.
    """
    folder = settings.include_path
    with explain_problems(name, "load", settings.task):
        manager = index_tasks(name, settings)
        with read_fresh(), compile_once():
            tasks = _load_tasks(name, manager, settings)
            modules = list_modules(path for task in tasks.values() for path in _list_sources(task))
            asked = {task_name: _digest_requests(task) for task_name, task in tasks.items()}
            requests = [request for task in tasks.values() for request in task.instances]
            longest = tuple(_list_longest(request for request in requests if request.request_type == "loglikelihood"))
            for task_name, task in tasks.items():
                check_judge(name, task_name, task)
                check_ends(name, task_name, task)
        questions = [read_question(name, request) for request in requests if request.request_type == GENERATE]
    digest = digest_json(
        [asked, sorted(map(digest_file, modules)), digest_folder(Path(folder), ignore=NOTES) if folder else ""]
    )
    asking: dict[tuple[str, Any], list[Any]] = {}  # requests by their document
    for request in requests:
        asking.setdefault((request.task_name, request.doc_id), []).append(request)
    documents = [some[0].doc for some in asking.values()]
    buckets = [list_buckets(some[0].doc, some[0].task_name, settings.task) for some in asking.values()]
    prompts = [[request.args for request in some] for some in asking.values()]
    own = list(map(name_cluster, documents))
    clusters = join_repeats(documents, prompts, own, num_fewshot=settings.num_fewshot)
    return Task(
        digest,
        tuple({question.digest: question for question in questions}.values()),
        tuple(zip(clusters, buckets, strict=True)),
        longest,
    )


def _list_longest(requests: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for request in heapq.nlargest(NUM_LONGEST, requests, key=lambda request: count_bytes("".join(request.args))):
        yield name_case(request.task_name, request.doc, request.doc_id), "".join(request.args)


def count_bytes(text: str) -> int:
    """Return how many bytes a text takes: nearer to its tokens than its characters are."""
    return len(text.encode(errors="replace"))


@contextlib.contextmanager
def read_fresh() -> Iterator[None]:
    """Let `datasets` read local files anew.

    Its cache knows a file by its path and time, and an archive by its path alone. It knows the outcome of a task's
    code by the code, without the files that the code reads. Data sets of the hub are cached by their commit, and stay
    so. Python knows compiled code by its time in seconds, so none is written.
    """
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as builders

    load, was_caching = datasets.load.load_dataset_builder, datasets.is_caching_enabled()
    with tempfile.TemporaryDirectory(prefix="quantgate-data-") as folder, quiet():

        def load_fresh(path: str, *args: Any, **options: Any) -> Any:
            is_local = path in builders or Path(path).is_dir()
            return load(path, *args, **options | ({"cache_dir": folder} if is_local else {}))

        datasets.disable_caching()
        try:
            with (
                mock.patch.object(datasets.load, "load_dataset_builder", load_fresh),
                mock.patch.object(sys, "dont_write_bytecode", True),
            ):
                yield
        finally:
            if was_caching:
                datasets.enable_caching()


@contextlib.contextmanager
def compile_once() -> Iterator[None]:
    """Let lm-eval compile each template once: it does so for every document, which takes most of the time."""
    from lm_eval import utils

    with mock.patch.object(utils.env, "from_string", cache(utils.env.from_string)):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars, and warnings of this thread, from the terminal; a failure is an exception."""
    import datasets
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    disable_progress_bars()
    stream = _OtherThreads(sys.stderr)
    with contextlib.redirect_stderr(stream):
        try:
            yield
        finally:
            stream.thread = None  # a log handler that was made meanwhile keeps it


class _OtherThreads(io.TextIOBase):
    """A stream that takes nothing from `thread`, at first the one that made it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.thread: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        """Write what another thread says."""
        return len(text) if threading.get_ident() == self.thread else self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def index_tasks(name: str, settings: HarnessEval) -> Any:
    """Return lm-eval's index of the tasks that an eval can name.

    Raises:
        SettingsError: the eval's own is not among them.
    """
    manager = _index(settings.include_path) if settings.include_path else _index_builtin()
    if settings.task not in manager.all_tasks:
        # lm-eval passes over a YAML file that it can't read
        near = ", ".join(sorted(manager.all_tasks)[:8]) or "no file there is the valid YAML of a task"
        near = near if settings.include_path else "see `lm-eval ls tasks`"
        raise SettingsError(
            f"evals.{name}.task: lm-eval knows no task {settings.task!r} "
            f"({settings.include_path or 'built in'}: {near})"
        )
    return manager


def _index(include_path: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=include_path is None)


@cache
def _index_builtin() -> Any:
    return _index(None)  # 14,000 files, which don't change while the program runs


def _load_tasks(name: str, manager: Any, settings: HarnessEval) -> dict[str, Any]:
    """Load a task, or the members of a group or tag, with their requests, as `simple_evaluate` does."""
    import numpy as np

    random.seed(0)  # a task's code may draw
    np.random.seed(FEWSHOT_SEED)
    written = manager.task_index[settings.task].cfg or {}
    kwargs = written.get("dataset_kwargs")
    try:
        tasks: dict[str, Any] = manager.load([settings.task])["tasks"]
    except StopIteration:  # from `datasets`, without a word
        raise FileNotFoundError(f"expected files with documents, found none or empty ones at {kwargs!r}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"expected documents in UTF-8, got {error} in a file of {kwargs!r}") from None
    except (KeyError, TypeError) as error:
        if mistake := _find_mistake(written, error):
            raise SettingsError(f"evals.{name}.task: {settings.task}: {mistake}") from None
        raise
    for task in tasks.values():
        if task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=settings.num_fewshot)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        task.build_all_requests()
    return tasks


def _find_mistake(written: Mapping[str, Any], error: Exception) -> str:
    """Return which key of a task's file lm-eval stumbled over, as it names none; "" where that is not seen.

    Args:
        written: what the file holds, without what it includes.
        error: lm-eval's.
    """
    from lm_eval.api.task import TaskConfig

    keys = [field.name for field in dataclasses.fields(TaskConfig)]
    if isinstance(error, TypeError) and (unknown := next((k for k in written if f"'{k}'" in str(error)), "")):
        return f"unknown key {unknown!r}; {suggest(unknown, keys) or 'remove it'}"
    if isinstance(error, KeyError):
        for split in ("test_split", "validation_split", "training_split", "fewshot_split"):
            if split in written and written[split] == error.args[0]:
                return f"{split}: its documents have no split {written[split]!r}; correct it"
        metrics = [m.get("metric") for m in written.get("metric_list") or () if isinstance(m, dict)]
        if unknown := next((m for m in metrics if isinstance(m, str) and m not in ACCURACY_METRICS), ""):
            near = suggest(unknown, ACCURACY_METRICS)
            return f"metric_list: expected {' or '.join(ACCURACY_METRICS)}, got {unknown!r}{near and f'; {near}'}"
    return ""


def _digest_requests(task: Any) -> str:
    """Return the digest of a task's settings, and of each document's requests and target in their order."""
    config = dict(task.dump_config())
    config["metadata"] = {k: v for k, v in (config.get("metadata") or {}).items() if k != "config_source"}  # a path
    sha = hashlib.sha256(_render(config))
    document_id = None
    for request in task.instances:
        if request.doc_id != document_id:
            document_id = request.doc_id
            sha.update(_render([request.doc, task.doc_to_target(request.doc)]))
        sha.update(_render([request.request_type, *request.args]))
    return sha.hexdigest()


def _render(value: Any) -> bytes:
    return json.dumps(value, default=_encode).encode() + b"\n"


def _encode(value: Any) -> Any:
    """Render what JSON has no form for; a task's documents hold whatever its data set does."""
    if callable(value):
        return value.__qualname__ if hasattr(value, "__qualname__") else type(value).__qualname__
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's
        return value.tolist()
    raise TypeError(f"expected documents and settings of text, numbers and lists, found a {type(value).__name__}")


def _list_sources(task: Any) -> Iterator[Path]:
    """List the files of the functions and classes that a task's settings name, and of its own class."""
    for value in (type(task), *_list_callables(vars(task.config) if hasattr(task, "config") else {})):
        with contextlib.suppress(TypeError):  # written in C
            if file := inspect.getsourcefile(inspect.unwrap(getattr(value, "func", value))):
                yield Path(file)


def _list_callables(value: Any) -> Iterator[Any]:
    if callable(value):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _list_callables(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _list_callables(part)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _list_callables(vars(value))
