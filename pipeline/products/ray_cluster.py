"""Evaluate and build candidates on a Ray cluster: who gets which shard.

Each replica is an actor that loads or serves the candidate once, and evaluates shard after shard, or as many at once as
its kind says (`pipeline/running/shards.py`). The driver takes over what a replica has written every second, so that a
worker or a node that dies costs what it was just doing; its shards go to others. At the end each replica does its part
of what comes after the shards, and one makes the evaluation of it all, as the stage does on one machine: the same bytes
come out, latencies aside.

`ray_replica.py` is a replica as seen from here, `ray_worker.py` what runs on the nodes: it alone imports Ray, too.
`ray_earlier.py` reads what an earlier run left.

Not covered: what is timed. The benchmark of speed stays on the machine of its stage.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import EngineError, SettingsError
from pipeline.products import KINDS, ray_worker
from pipeline.products.params import load_params
from pipeline.products.ray_earlier import EarlierShards, read_entries_by_eval
from pipeline.products.ray_replica import Project, RemoteReplica, share_project, start_replica
from pipeline.products.ray_worker import Order
from pipeline.records.fingerprints import read_environment
from pipeline.running.journal import lock_candidate
from pipeline.running.progress import Progress
from pipeline.running.shards import Shard, find_count
from pipeline.settings.base import Product
from pipeline.settings.execution import RayExecution

SHARDS_A_WORKER = 2  # times as many as it evaluates at once: a slow one takes fewer
MAX_FAILURES = 3  # of one shard: then it is the shard's own doing
MAX_FAILED_STARTS = 3  # then no more are tried, while those that are ready go on
_POLL_S = 1.0
_LOST = object()  # what a replica that died or failed answers


@dataclass
class _Run:
    """Where an evaluation stands."""

    ray: Any  # connected
    execution: RayExecution
    order: Order
    at_once: int  # shards of a replica
    count: int
    waiting: deque[Shard]
    earlier: EarlierShards
    failures: Counter[Shard] = field(default_factory=Counter)
    avoided: dict[Shard, set[str]] = field(default_factory=dict)  # hosts on which a shard failed
    alone: set[Shard] = field(default_factory=set)  # not given out beside others: a replica that had them failed
    num_dead: int = 0
    num_retries: int = 0  # shards given out again
    num_failed_starts: int = 0  # since one was lost at work
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
        raise SettingsError("execution.kind: ray is not installed; `pip install` it as docs/scale.md says") from None
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
        share_project(ray, list_files) as project,
    ):
        available = ray.cluster_resources()
        _tell_missing(execution, available)
        num_workers = execution.count_workers(available)
        at_once = KINDS[product.kind].shards_at_once
        folder = build / "shards" / candidate
        count = find_count(folder) or num_workers * at_once * SHARDS_A_WORKER
        earlier = EarlierShards(folder)
        shards = [Shard(number, count) for number in range(1, count + 1)]
        waiting = deque(shard for shard in shards if shard not in earlier.finished)
        run = _Run(ray, execution, order, at_once, count, waiting, earlier)
        replicas = [start_replica(ray, execution, at_once) for _ in range(min(num_workers, max(1, len(run.waiting))))]
        _finish(run, _run_shards(run, replicas, project), project)


def build_on_ray(
    execution: RayExecution, candidate: str, product: Product, list_files: Callable[[], list[Path]]
) -> str:
    """Build a candidate on a cluster and put it in place; return a line that says what it became."""
    order = Order(candidate, product.build.as_posix(), read_environment())
    with connect(execution) as ray, share_project(ray, list_files) as project:
        _tell_missing(execution, ray.cluster_resources())
        replica = start_replica(ray, execution, 1)
        seen = replica.get(replica.look(project))
        replica.get(replica.begin(order, project, seen))
        said: str = replica.get(replica.actor.make.remote())
        if not replica.sees_root:
            replica.fetch_made("candidates", product.build / "candidates" / candidate)
        return said


def _run_shards(run: _Run, replicas: list[RemoteReplica], project: Project) -> list[RemoteReplica]:
    """Give shards to replicas until all are finished; return those that still work, first any that ran one."""
    starting = {replica.look(project): replica for replica in replicas}
    running: dict[Any, tuple[RemoteReplica, Shard]] = {}
    ready: list[RemoteReplica] = []
    progress = Progress(run.order.candidate, total=run.count, kept=run.count - len(run.waiting), unit="shards")
    while run.waiting or running or not ready:
        done, _ = run.ray.wait([*starting, *running], timeout=_POLL_S) if starting or running else ([], [])
        for reference in done:
            if reference in running:
                _finish_shard(run, *running.pop(reference), reference)
                continue
            replica = starting.pop(reference)
            is_last = not starting and all(other.is_lost for other in ready)
            if (result := _ask_start(run, replica, reference, is_last=is_last)) is _LOST:
                continue
            if replica.host:
                ready.append(replica)
            else:  # it said where it is, and does not know yet what to do
                begun = replica.begin(run.order, project, result)
                starting[replica.open(begun) if run.waiting else begun] = replica
        ready = [replica for replica in ready if not replica.is_lost]
        _assign(run, ready, running, num_starting=len(starting))
        for _ in range(_count_missing(run, len(starting) + len(ready), len(ready))):
            replica = start_replica(run.ray, run.execution, run.at_once)
            starting[replica.look(project)] = replica
        for replica in ready:
            if replica.shards:
                replica.take_new(run.folder)
        progress.reach(run.count - len(run.waiting) - len(running), note=_format_replicas(run, ready))
    for replica in starting.values():
        replica.end()
    return sorted(ready, key=lambda replica: not replica.known)


def _count_missing(run: _Run, num_workers: int, num_ready: int) -> int:
    """Return how many replicas to start: for those that were lost, or where a cluster has grown, if it has work.

    None after so many that could not start, as on the same node no other would; those on other nodes go on.
    """
    useful = max(1, num_ready + len(run.waiting))
    if useful <= num_workers or run.num_failed_starts >= MAX_FAILED_STARTS:
        return 0
    return max(0, min(run.execution.count_workers(run.ray.cluster_resources()), useful) - num_workers)


def _ask_start(run: _Run, replica: RemoteReplica, reference: Any, *, is_last: bool) -> Any:
    """Return what a replica that starts answered, or that it is lost.

    Raises:
        EngineError: too many could not start, none is ready, and no other starts.
    """
    try:
        return run.ray.get(reference)
    except run.ray.exceptions.RayError as error:
        problem = _lose(run, replica, error, is_start=True)
    run.num_failed_starts += 1
    if is_last and run.num_failed_starts >= MAX_FAILED_STARTS:
        raise EngineError(f"{problem}; what finished is kept, run `dvc repro` to go on")
    tried = "" if run.num_failed_starts < MAX_FAILED_STARTS else ", no more are tried"
    print(f"  {problem}; failed starts: {run.num_failed_starts}{tried}", file=sys.stderr, flush=True)
    return _LOST


def _finish_shard(run: _Run, replica: RemoteReplica, shard: Shard, reference: Any) -> None:
    """Take over a shard that has ended; one that failed waits again, and so does what was at work beside it.

    Raises:
        EngineError: it failed too often.
    """
    was_lost = replica.is_lost
    try:
        run.ray.get(reference)
        replica.take_rest(run.folder, shard)
        replica.shards.discard(shard)
        _drop_stale(run)
        return
    except run.ray.exceptions.RayError as error:
        problem = None if was_lost else _lose(run, replica, error)
    run.num_failed_starts = 0  # there is room again where it worked
    run.waiting.appendleft(shard)
    run.num_retries += 1
    if problem is None:  # the other one failed, as far as one can tell
        print(f"  shard {shard}: was evaluated beside it; given to another replica too", file=sys.stderr, flush=True)
        return
    run.failures[shard] += 1
    run.avoided.setdefault(shard, set()).add(replica.host)
    print(f"  shard {shard}: {problem}; given to another replica", file=sys.stderr, flush=True)
    if run.failures[shard] >= MAX_FAILURES:
        raise EngineError(
            f"{run.order.candidate}: shard {shard} failed {MAX_FAILURES} times, last on {problem}; what finished is "
            "kept, run `dvc repro` to go on"
        )


def _lose(run: _Run, replica: RemoteReplica, error: Any, *, is_start: bool = False) -> EngineError:
    """End a replica that failed or died, and return why."""
    run.num_dead += not replica.is_own(error)
    problem = replica.explain_start(error) if is_start else replica.explain(error)
    replica.is_lost = True
    run.alone |= replica.shards
    replica.end()
    return problem


def _assign(
    run: _Run, ready: Sequence[RemoteReplica], running: dict[Any, tuple[RemoteReplica, Shard]], *, num_starting: int
) -> None:
    """Give waiting shards to replicas that are free: not to a host on which one failed, while there are others.

    Each gets one before any gets another, also those that still start.
    """
    hosts = {replica.host for replica in ready}
    for number in range(run.at_once):
        for replica in ready:
            if (
                len(replica.shards) > number
                or replica.shards & run.alone
                or (number and len(run.waiting) <= num_starting)
            ):
                continue
            able = [shard for shard in run.waiting if not number or shard not in run.alone]
            shard = next((s for s in able if replica.host not in run.avoided.get(s, set())), None)
            if shard is None:
                shard = next((s for s in able if hosts <= run.avoided.get(s, set())), None)
            if shard is None:
                continue
            run.waiting.remove(shard)
            replica.shards.add(shard)
            entries = read_entries_by_eval(run.folder / shard.folder)
            running[replica.actor.run.remote(shard.number, shard.count, entries)] = (replica, shard)


def _format_replicas(run: _Run, replicas: Sequence[RemoteReplica]) -> str:
    """Return how many entries a second each replica writes, and how many replicas died."""
    seconds = time.monotonic() - run.start
    rates = ", ".join(f"{replica.host} {replica.num_entries / seconds:.1f}/s" for replica in replicas)
    lost = f", {run.num_dead} dead, {run.num_retries} retries" if run.num_dead or run.num_retries else ""
    return f"{len(replicas)} replica{'s' * (len(replicas) > 1)} ({rates}){lost}"


def _prepare(run: _Run, replicas: list[RemoteReplica]) -> list[bytes]:
    """Have each replica that ran a shard do its part of what comes after them, all at once.

    Returns:
        What the first of those that still work is given to finish with; it does itself what is missing.
    """
    able = [replica for replica in replicas if replica.known]
    asked = [replica.actor.prepare.remote(number, len(able)) for number, replica in enumerate(able, 1)]
    prepared = []
    for replica, reference in zip(able, asked, strict=True):
        try:
            prepared.append(run.ray.get(reference))
        except run.ray.exceptions.RayError as error:
            problem = replica.explain(error)
            if len(replicas) == 1:
                raise EngineError(f"{problem}; what finished is kept, run `dvc repro` to go on") from None
            print(f"  {problem}; another replica does its part", file=sys.stderr, flush=True)
            replicas.remove(replica)
            replica.end()
    return [part for part in prepared if part is not None]


def _finish(run: _Run, replicas: list[RemoteReplica], project: Project) -> None:
    """Have one replica make the evaluation of all shards and of what the others prepared, and put it in place."""
    prepared = _prepare(run, replicas)
    replica, *others = replicas
    for other in others:
        other.end()
    files = [path.as_posix() for path in sorted(run.folder.rglob("*")) if path.is_file()]
    replica.get(replica.actor.finish.remote(files, project.server, prepared))
    replica.fetch_made("evaluations", Path(run.order.build) / "evaluations" / run.order.candidate)
    shutil.rmtree(run.folder, ignore_errors=True)


def _tell_missing(execution: RayExecution, available: Mapping[str, float]) -> None:
    """Say which resources of a replica the whole cluster lacks: Ray waits for them without a word.

    No error: an autoscaler adds a node once it is waited for.
    """
    lacking = {name: amount for name, amount in execution.resources.items() if available.get(name, 0) < amount}
    if lacking:
        print(
            f"  execution.resources: a replica needs {_format_resources(lacking)}, and the cluster has "
            f"{_format_resources({name: available.get(name, 0) for name in lacking})}: waiting for a node that has it",
            file=sys.stderr,
            flush=True,
        )


def _format_resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _drop_stale(run: _Run) -> None:
    """Have shards of an earlier run evaluated again that are stale."""
    again = run.earlier.drop_stale()
    run.waiting.extend(again)
    if again:
        print(
            f"  {run.order.candidate}: {len(again)} shards of an earlier run had other settings, cases or code: they "
            "are evaluated again",
            file=sys.stderr,
            flush=True,
        )


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
