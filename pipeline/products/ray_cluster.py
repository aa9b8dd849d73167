"""Evaluate and build candidates on a Ray cluster: the only importer of Ray beside `ray_worker.py`, which it sends.

Each replica is an actor that loads or serves the candidate once, and evaluates shard after shard, or as many at once as
its kind says (`pipeline/running/shards.py`). The driver takes over what a replica has written every second, so that a
worker or a node that dies costs what it was just doing; its shards go to others. At the end each replica does its part
of what comes after the shards, and one makes the evaluation of it all, as the stage does on one machine: the same bytes
come out, latencies aside.

Not covered: what is timed. The benchmark of speed stays on the machine of its stage.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import EngineError, QuantgateError, SettingsError
from pipeline.products import KINDS, ray_worker
from pipeline.products.params import load_params
from pipeline.products.ray_worker import FileServer, Order, Replica, SentFile, receive
from pipeline.records.digests import digest_file
from pipeline.records.files import replace_folder
from pipeline.records.fingerprints import read_environment
from pipeline.records.record_files import read_record
from pipeline.running.journal import lock_candidate
from pipeline.running.progress import Progress
from pipeline.running.shards import Attempt, Shard
from pipeline.settings.base import Product
from pipeline.settings.execution import RayExecution

SHARDS_A_WORKER = 2  # times as many as it evaluates at once: a slow one takes fewer
MAX_FAILURES = 3  # of one shard: then it is the shard's own doing
_POLL_S = 1.0
_LOST = object()  # what a replica that died or failed answers


@dataclass
class _Worker:
    """A replica as the driver sees it."""

    actor: Any
    host: str = ""
    sees_root: bool = False  # the driver's folder
    shards: set[Shard] = field(default_factory=set)  # that it evaluates
    is_lost: bool = False  # it failed or died
    num_entries: int = 0  # that came from it
    known: dict[str, int] = field(default_factory=dict)  # bytes that came of each file
    asked: Any = None  # what is new; None: nothing is on its way

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.host or "a replica"


@dataclass
class _Run:
    """Where an evaluation stands."""

    execution: RayExecution
    order: Order
    at_once: int  # shards of a replica
    count: int
    waiting: deque[Shard]
    failures: Counter[Shard] = field(default_factory=Counter)
    avoided: dict[Shard, set[str]] = field(default_factory=dict)  # hosts on which a shard failed
    alone: set[Shard] = field(default_factory=set)  # not given out beside others: a replica that had them failed
    num_dead: int = 0
    num_retries: int = 0  # shards given out again
    num_failed_starts: int = 0  # in a row
    start: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        """Where shards lie."""
        return Path(self.order.build) / "shards" / self.order.candidate


@contextlib.contextmanager
def connect(execution: RayExecution) -> Iterator[Any]:
    """Yield Ray, connected to a cluster; leave it at the end, which ends what was started there.

    Raises:
        SettingsError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ImportError:
        raise SettingsError("execution.kind: ray is not installed; `pip install 'quantgate[ray]'`") from None
    ray.cloudpickle.register_pickle_by_value(ray_worker)
    try:
        ray.init(execution.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"execution.address: expected a Ray cluster at {execution.address!r}, found none "
            f"({' '.join(str(error).split())[:200]}); start one with `ray start --head`, or set execution.kind to local"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def evaluate_on_ray(
    execution: RayExecution, candidate: str, product: Product, list_files: Callable[[], list[Path]]
) -> None:
    """Evaluate a candidate on a cluster and put the evaluation in place, as the stage does on one machine.

    Args:
        execution: the cluster, and how many replicas of which resources.
        candidate: its name.
        product: that owns it.
        list_files: the files of the project that a node needs which does not see its folder.

    Raises:
        EngineError: a shard failed on several replicas, or no replica could start.
        EvidenceError: the candidate was not built.
        JournalError: another process evaluates the candidate.
    """
    build = product.build
    # here: replicas would be started for it and say it one after another
    KINDS[product.kind].get_auditor().read_candidate(build, candidate, product)
    order = Order(candidate, build.as_posix(), read_environment())
    with (
        lock_candidate(build, candidate),
        connect(execution) as ray,
        _share_project(ray, list_files) as project,
    ):
        num_workers = execution.count_workers(ray.cluster_resources())
        at_once = KINDS[product.kind].shards_at_once
        count = _find_count(build / "shards" / candidate) or num_workers * at_once * SHARDS_A_WORKER
        finished = _list_finished(build / "shards" / candidate)
        shards = [Shard(number, count) for number in range(1, count + 1)]
        run = _Run(execution, order, at_once, count, deque(shard for shard in shards if shard not in finished))
        workers = [_start(ray, run) for _ in range(min(num_workers, max(1, len(run.waiting))))]
        _finish(ray, run, _run_shards(ray, run, workers, project), project)


def build_on_ray(
    execution: RayExecution, candidate: str, product: Product, list_files: Callable[[], list[Path]]
) -> str:
    """Build a candidate on a cluster and put it in place; return a line that says what it became."""
    order = Order(candidate, product.build.as_posix(), read_environment())
    with connect(execution) as ray, _share_project(ray, list_files) as project:
        worker = _start(ray, _Run(execution, order, 1, 1, deque()))
        seen = _get(ray, worker, worker.actor.look.remote(project.root, project.token))
        _get(ray, worker, _begin(worker, order, project, seen))
        said: str = _get(ray, worker, worker.actor.make.remote())
        if not worker.sees_root:
            _fetch_made(ray, worker, "candidates", product.build / "candidates" / candidate)
        return said


class _Project:
    """The driver's folder, as nodes see it or are sent it."""

    def __init__(self, ray: Any, list_files: Callable[[], list[Path]]) -> None:
        self.root, self.token = str(Path.cwd()), f"build/.ray-{uuid.uuid4().hex}"
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        options = {"num_cpus": 0, "max_concurrency": 8, "scheduling_strategy": here}
        self.server = ray.remote(FileServer).options(**options).remote(self.root)
        self._list_files = list_files

    @cached_property
    def files(self) -> list[SentFile]:
        """All that a node without this folder needs."""
        return [SentFile(path.as_posix(), digest_file(path)) for path in self._list_files()]


@contextlib.contextmanager
def _share_project(ray: Any, list_files: Callable[[], list[Path]]) -> Iterator[_Project]:
    project = _Project(ray, list_files)
    token = Path(project.token)
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()
    try:
        yield project
    finally:
        token.unlink(missing_ok=True)


def _start(ray: Any, run: _Run) -> _Worker:
    resources = dict(run.execution.resources)
    options = {
        "num_cpus": resources.pop("CPU", 0 if "GPU" in resources else 1),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "max_concurrency": run.at_once + 1,  # it is asked what is new while it works
    }
    return _Worker(ray.remote(Replica).options(**options).remote())


def _begin(worker: _Worker, order: Order, project: _Project, seen: tuple[str, bool]) -> Any:
    """Give a replica its project, where it does not see it, and its order; return what to wait for.

    Args:
        worker: the replica.
        order: what it serves.
        project: the driver's folder.
        seen: what it says of itself: its host, and whether it sees that folder.
    """
    worker.host, worker.sees_root = seen
    root = project.root if worker.sees_root else worker.actor.fetch.remote(project.files, project.server)
    return worker.actor.begin.remote(root, order)


def _get(ray: Any, worker: _Worker, reference: Any) -> Any:
    """Return a result, or raise what a user can act on with the host where it was raised."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        problem = _explain(ray, worker, error)
        remedy = "" if _is_own(ray, error) else "; run `dvc repro` to go on"
        raise EngineError(f"{problem}{remedy}") from None


def _is_own(ray: Any, error: Any) -> bool:
    """Say whether a replica raised an error itself; else its process or node ended, maybe with a result on it."""
    return isinstance(error, ray.exceptions.RayTaskError)


def _explain(ray: Any, worker: _Worker, error: Any) -> EngineError:
    """Return what a user can act on of an error of a call; raise one that is none of these as it is."""
    if not _is_own(ray, error):
        return EngineError(f"{worker.name}: its worker ended by itself")
    if isinstance(error.cause, ImportError):
        said = f"expected the project's environment on this node: {error.cause}; install it there"
        return EngineError(f"{worker.name}: {said}")
    if isinstance(error.cause, QuantgateError | OSError):
        return EngineError(f"{worker.name}: {error.cause}")
    raise error


def _run_shards(ray: Any, run: _Run, workers: list[_Worker], project: _Project) -> list[_Worker]:
    """Give shards to replicas until all are finished; return those that still work, first any that ran one."""
    starting = {worker.actor.look.remote(project.root, project.token): worker for worker in workers}
    running: dict[Any, tuple[_Worker, Shard]] = {}
    ready: list[_Worker] = []
    progress = Progress(run.order.candidate, total=run.count, kept=run.count - len(run.waiting), unit="shards")
    while run.waiting or running or not ready:
        done, _ = ray.wait([*starting, *running], timeout=_POLL_S) if starting or running else ([], [])
        for reference in done:
            if reference in running:
                _finish_shard(ray, run, *running.pop(reference), reference)
                continue
            worker = starting.pop(reference)
            if (result := _ask_start(ray, run, worker, reference)) is _LOST:
                continue
            if worker.host:
                ready.append(worker)
            else:  # it said where it is, and does not know yet what to do
                starting[_begin(worker, run.order, project, result)] = worker
        ready = [worker for worker in ready if not worker.is_lost]
        _assign(run, ready, running, num_starting=len(starting))
        for _ in range(_count_missing(ray, run, len(starting) + len(ready), len(ready))):
            worker = _start(ray, run)
            starting[worker.actor.look.remote(project.root, project.token)] = worker
        for worker in ready:
            if worker.shards:
                _take_new(ray, run, worker)
        progress.reach(run.count - len(run.waiting) - len(running), note=_format_replicas(run, ready))
    return sorted(ready, key=lambda worker: not worker.known)


def _count_missing(ray: Any, run: _Run, num_workers: int, num_ready: int) -> int:
    """Return how many replicas to start: for those that were lost, or where a cluster has grown, if it has work."""
    useful = max(1, num_ready + len(run.waiting))
    if useful <= num_workers:
        return 0
    return max(0, min(run.execution.count_workers(ray.cluster_resources()), useful) - num_workers)


def _ask_start(ray: Any, run: _Run, worker: _Worker, reference: Any) -> Any:
    """Return what a replica that starts answered, or that it is lost.

    Raises:
        EngineError: so many in a row could not start.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        problem = _lose(ray, run, worker, error)
    run.num_failed_starts += 1
    if run.num_failed_starts >= MAX_FAILURES:
        raise problem
    return _LOST


def _finish_shard(ray: Any, run: _Run, worker: _Worker, shard: Shard, reference: Any) -> None:
    """Take over a shard that has ended; one that failed waits again, and so does what was at work beside it.

    Raises:
        EngineError: it failed too often.
    """
    was_lost = worker.is_lost
    try:
        ray.get(reference)
        _take_rest(ray, run, worker, shard)
        run.num_failed_starts = 0
        worker.shards.discard(shard)
        return
    except ray.exceptions.RayError as error:
        problem = None if was_lost else _lose(ray, run, worker, error)
    run.waiting.appendleft(shard)
    run.num_retries += 1
    if problem is None:  # the other one failed, as far as one can tell
        print(f"  shard {shard}: was evaluated beside it; given to another replica too", file=sys.stderr, flush=True)
        return
    run.failures[shard] += 1
    run.avoided.setdefault(shard, set()).add(worker.host)
    print(f"  shard {shard}: {problem}; given to another replica", file=sys.stderr, flush=True)
    if run.failures[shard] >= MAX_FAILURES:
        raise EngineError(
            f"{run.order.candidate}: shard {shard} failed {MAX_FAILURES} times, last on {problem}; what finished is "
            "kept, run `dvc repro` to go on"
        )


def _lose(ray: Any, run: _Run, worker: _Worker, error: Any) -> EngineError:
    """End a replica that failed or died, and return why."""
    run.num_dead += not _is_own(ray, error)
    problem = _explain(ray, worker, error)
    worker.is_lost = True
    run.alone |= worker.shards
    ray.kill(worker.actor)
    return problem


def _assign(
    run: _Run, ready: Sequence[_Worker], running: dict[Any, tuple[_Worker, Shard]], *, num_starting: int
) -> None:
    """Give waiting shards to replicas that are free: not to a host on which one failed, while there are others.

    Each gets one before any gets another, also those that still start.
    """
    hosts = {worker.host for worker in ready}
    for number in range(run.at_once):
        for worker in ready:
            if (
                len(worker.shards) > number
                or worker.shards & run.alone
                or (number and len(run.waiting) <= num_starting)
            ):
                continue
            able = [shard for shard in run.waiting if not number or shard not in run.alone]
            shard = next((s for s in able if worker.host not in run.avoided.get(s, set())), None)
            if shard is None:
                shard = next((s for s in able if hosts <= run.avoided.get(s, set())), None)
            if shard is None:
                continue
            run.waiting.remove(shard)
            worker.shards.add(shard)
            earlier = _read_earlier(run.folder / shard.folder)
            running[worker.actor.run.remote(shard.number, shard.count, earlier)] = (worker, shard)


def _take_new(ray: Any, run: _Run, worker: _Worker) -> None:
    """Take over what a replica has written, where it has answered: one that hangs keeps nobody waiting."""
    if worker.asked is not None and ray.wait([worker.asked], timeout=0)[0]:
        # its end is dealt with where its shard is waited for
        with contextlib.suppress(ray.exceptions.RayError):
            _write_new(run, worker, ray.get(worker.asked))
        worker.asked = None
    if worker.asked is None:
        worker.asked = worker.actor.read_new.remote(dict(worker.known))


def _take_rest(ray: Any, run: _Run, worker: _Worker, shard: Shard) -> None:
    """Take over all that a replica has written of a shard that it finished; beside it, it may go on to write others."""
    worker.asked = None
    has_more = True
    while has_more:
        new = ray.get(worker.actor.read_new.remote(dict(worker.known)))
        _write_new(run, worker, new)
        has_more = any(name.startswith(f"{shard.folder}/") and name.endswith(".jsonl") for name, _, _ in new)


def _write_new(run: _Run, worker: _Worker, new: Sequence[tuple[str, int, bytes]]) -> None:
    """Write to the driver's own files what came."""
    for name, offset, data in new:
        path = run.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            path.write_bytes(data)
            continue
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(offset)
            file.write(data)
        worker.num_entries += data.count(b"\n")
        worker.known[name] = offset + len(data)


def _format_replicas(run: _Run, workers: Sequence[_Worker]) -> str:
    """Return how many entries a second each replica writes, and how many replicas died."""
    seconds = time.monotonic() - run.start
    rates = ", ".join(f"{worker.host} {worker.num_entries / seconds:.1f}/s" for worker in workers)
    lost = f", {run.num_dead} dead, {run.num_retries} retries" if run.num_dead or run.num_retries else ""
    return f"{len(workers)} replica{'s' * (len(workers) > 1)} ({rates}){lost}"


def _prepare(ray: Any, workers: list[_Worker]) -> list[bytes]:
    """Have each replica that ran a shard do its part of what comes after them, all at once.

    Returns:
        What the first of those that still work is given to finish with; it does itself what is missing.
    """
    able = [worker for worker in workers if worker.known]
    asked = [worker.actor.prepare.remote(number, len(able)) for number, worker in enumerate(able, 1)]
    prepared = []
    for worker, reference in zip(able, asked, strict=True):
        try:
            prepared.append(ray.get(reference))
        except ray.exceptions.RayError as error:
            problem = _explain(ray, worker, error)
            if len(workers) == 1:
                raise EngineError(f"{problem}; what finished is kept, run `dvc repro` to go on") from None
            print(f"  {problem}; another replica does its part", file=sys.stderr, flush=True)
            workers.remove(worker)
            ray.kill(worker.actor)
    return [part for part in prepared if part is not None]


def _finish(ray: Any, run: _Run, workers: list[_Worker], project: _Project) -> None:
    """Have one replica make the evaluation of all shards and of what the others prepared, and put it in place."""
    prepared = _prepare(ray, workers)
    worker, *others = workers
    for other in others:
        ray.kill(other.actor)
    files = [path.as_posix() for path in sorted(run.folder.rglob("*")) if path.is_file()]
    _get(ray, worker, worker.actor.finish.remote(files, project.server, prepared))
    _fetch_made(ray, worker, "evaluations", Path(run.order.build) / "evaluations" / run.order.candidate)
    shutil.rmtree(run.folder, ignore_errors=True)


def _fetch_made(ray: Any, worker: _Worker, folder: str, target: Path) -> None:
    made = target.with_name(f".{target.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    for path in _get(ray, worker, worker.actor.list_made.remote(folder)):

        def read(offset: int, path: str = path) -> bytes:
            data: bytes = _get(ray, worker, worker.actor.read_made.remote(folder, path, offset))
            return data

        receive(made / path, read)
    replace_folder(made, target)


def _read_earlier(folder: Path) -> Mapping[str, bytes]:
    """Return the entries of former attempts at a shard, by eval."""
    earlier: dict[str, bytes] = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        data = path.read_bytes()
        earlier[path.stem] = earlier.get(path.stem, b"") + data[: data.rfind(b"\n") + 1]
    return earlier


def _find_count(folder: Path) -> int | None:
    """Return in how many shards an earlier run was cut; None where there is none."""
    counts = {int(path.name.rpartition("-")[2]) for path in folder.glob("*-of-*")}
    return counts.pop() if len(counts) == 1 else None


def _list_finished(folder: Path) -> set[Shard]:
    """Return the shards that an earlier run finished."""
    attempts = [read_record(path, Attempt) for path in folder.glob("*-of-*/*/attempt.json")]
    return {Shard(attempt.number, attempt.count) for attempt in attempts if attempt.is_finished}


def main() -> int:
    """Say on stderr why the cluster of params.yaml can't be worked on; return 1 then."""
    execution = load_params().execution
    try:
        if isinstance(execution, RayExecution):
            with connect(execution):
                pass
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
