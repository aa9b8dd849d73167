"""Make and evaluate what is out of date side by side, for the stages to take over: the command `quantgate prefetch`.

`dvc repro` runs one stage after another, and each imports torch and its friends anew. Here several candidates are
worked on at once, each step in a process that has its imports already (`pipeline/running/warm_processes.py`). DVC
itself says what it would run. Results go where the stages put them. Beside that they are kept under the digest of their
inputs (`pipeline/running/prefetched.py`). A `dvc repro` afterwards takes them over, checks and judges.

The workers or servers of a candidate are its product's, divided by the number of candidates at work. Where one is left,
the step's own process does the work. Of several GPUs each candidate is evaluated on its share.

Benchmark and judgement need all candidates of a product: whoever calls `make_ahead` may judge one as soon as these are
made (`judging.py`). With `execution.kind: ray` a step is sent to the cluster, as its stage does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from filelock import FileLock, Timeout

from pipeline.errors import EvidenceError, JournalError, QuantgateError, SettingsError
from pipeline.products import KINDS
from pipeline.products.inputs import WORKS
from pipeline.products.jobs import count_jobs
from pipeline.products.params import Params, load_params
from pipeline.products.prefetch_step import Order, carry_out, preload
from pipeline.records.plain_text import format_line
from pipeline.running.environment import list_own_gpus
from pipeline.running.lock_holders import name_holder
from pipeline.running.prefetched import read_watched
from pipeline.running.progress_view import View, end_on_sigterm
from pipeline.running.run_state import Ending
from pipeline.running.staleness import RWLOCK, Plan, open_project, read_own_commands
from pipeline.running.warm_processes import INTERRUPTED, WarmProcess
from pipeline.settings.base import ENV, Product
from pipeline.settings.execution import RayExecution

Ask = Callable[[str], Plan]
STAGES = ("optimize", "evaluate")
ENV_STAGE = "env"  # runs every time
_WAITING = "OMP_WAIT_POLICY"  # changes no result
_ENDED_ON_REQUEST = (INTERRUPTED, -signal.SIGTERM)  # exit codes of a step


@dataclass(frozen=True)
class Share:
    """How the machine is shared out among the candidates that are worked on at once; no jobs: nothing is gained."""

    params: Params
    watched: Mapping[str, Mapping[str, Mapping[str, str]]]  # by candidate
    num_jobs: int
    gpus: Sequence[str]

    def give(self, name: str, product: Product, place: int) -> Order:
        """Return the order for a candidate at a place, counted from 0; its stage is to be filled in."""
        start = place % max(1, len(self.gpus))
        needed = [*self.gpus[start:], *self.gpus[:start]][: max(1, product.count_whole_gpus(name))]
        own = max(self.gpus[place :: self.num_jobs], needed, key=len)
        return Order(
            stage="",
            candidate=name,
            product=product,
            params=self.params,
            watched=self.watched[name],
            num_workers=max(1, product.num_workers // self.num_jobs),
            gpus=",".join(own) if own else None,
        )


def prefetch(names: Sequence[str], num_jobs: int | None) -> None:
    """Make and evaluate all that `dvc repro` would.

    Args:
        names: of products or candidates; none: all.
        num_jobs: candidates at once; None: as `count_jobs` says.

    Raises:
        SettingsError: params.yaml is wrong, or a name is not in it.
        JournalError: another prefetch runs.
        QuantgateError: candidates failed; what the others made is kept.
    """
    with open_run(names, num_jobs) as (view, candidates, share):
        if share.num_jobs:
            make_ahead(view, candidates, share)
        else:
            view.say("prefetch: `dvc repro` alone takes as long; name the number of candidates at once, as in --jobs 4")


@contextlib.contextmanager
def open_run(names: Sequence[str], num_jobs: int | None) -> Iterator[tuple[View, Mapping[str, Product], Share]]:
    """Keep others away, run stage `env`, and give the view of the run, the candidates that are named, and their share.

    Raises:
        SettingsError: params.yaml is wrong, or a name is not in it.
        JournalError: another run works here.
        QuantgateError: stage `env` failed.
    """
    start = time.monotonic()
    params = load_params()  # stage `env` would tell a mistake there too, and then that it failed
    candidates = choose_candidates(params, names)
    with lock_project():
        run_env()
        watched = {name: {stage: read_watched(stage, name) for stage in STAGES} for name in candidates}
        num_jobs = num_jobs or count_jobs(params, candidates.values())
        with View(ENV / "progress.jsonl", start=start) as view, end_on_sigterm(view):
            yield view, candidates, Share(params, watched, num_jobs, list_own_gpus())


class Judge(Protocol):
    """Who judges a product as soon as all of its candidates are made, while others are worked on.

    Attributes:
        unfit: names of products for which `find_unfit` found something.
    """

    unfit: list[str]

    def list_steps(self, product: Product) -> list[str]:
        """Return the names of the steps that this takes; none: the product is not judged yet."""

    def find_unfit(self, product: Product) -> list[str]:
        """Return why nothing can be compared with a product's reference, now that it is evaluated; mostly nothing."""

    def judge(self, product: Product, gpus: str | None) -> None:
        """Do it, on the GPUs that CUDA_VISIBLE_DEVICES would name; None: all of this process."""

    def end(self) -> None:
        """End what is at work, and begin nothing more."""


def make_ahead(view: View, candidates: Mapping[str, Product], share: Share, judge: Judge | None = None) -> None:
    """Make and evaluate candidates where DVC would.

    Args:
        view: of the run.
        candidates: each with its product.
        share: of the machine.
        judge: of products whose candidates are all made; None: nobody.

    Raises:
        QuantgateError: candidates failed; what the others made is kept.
    """
    # threads of one step that wait for each other by spinning take the cores from the other steps: CPU time halves
    os.environ.setdefault(_WAITING, "passive")
    with open_project() as ask, _Workshop(view) as workshop:
        failed = _make_all(ask, workshop, candidates, share, view, judge)
    if failed:
        raise QuantgateError(f"{', '.join(failed)}: failed, as said above; what finished is kept")


def choose_candidates(params: Params, names: Sequence[str]) -> dict[str, Product]:
    """Return the candidates that are named, or of products that are, each with its product; without names all.

    Raises:
        SettingsError: a name is neither.
    """
    owners = {name: product for product in params.products.values() for name in product.candidates}
    if unknown := [name for name in names if name not in params.products and name not in owners]:
        raise SettingsError(
            f"prefetch: expected products ({', '.join(params.products)}) or candidates, got {', '.join(unknown)}"
        )
    return {name: product for name, product in owners.items() if not names or name in names or product.name in names}


@contextlib.contextmanager
def lock_project() -> Iterator[None]:
    """Keep a second prefetch away: it would only wait for the same candidates."""
    path = ENV / "prefetch.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            _remove_half_a_lock()
            yield
    except Timeout:
        raise JournalError(
            f"{path}: expected one prefetch at a time, another one runs{name_holder(path)}; wait for it or end it"
        ) from None


def _remove_half_a_lock() -> None:
    """Remove DVC's list of readers and writers where a kill left half of it: DVC would refuse all work from then on."""
    for wait_s in (0.5, 0.0):  # a DVC that runs may be writing it
        try:
            json.loads(RWLOCK.read_text(encoding="utf-8"))
            return
        except FileNotFoundError:
            return
        except ValueError:
            time.sleep(wait_s)
    print(f"prefetch: {RWLOCK} was left half written by a run that was killed, and is removed", file=sys.stderr)
    RWLOCK.unlink(missing_ok=True)


def run_env() -> None:
    """Run stage `env`, whose digests say what is out of date; it also checks settings, files and memory."""
    for command in read_own_commands(Path(), ENV_STAGE):
        if subprocess.run(command, shell=True, env=os.environ | {WORKS: "1"}).returncode:
            raise QuantgateError("stage env: failed, as said above; nothing was made")


def _check_cluster() -> None:
    """Refuse to start without the cluster, which each candidate would say; in its own process: Ray takes signals over.

    Raises:
        SettingsError: Ray is not installed, or there is no such cluster.
    """
    command = [sys.executable, "-m", "pipeline.products.ray_cluster"]
    asked = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    if asked.returncode:
        said = asked.stderr.strip().rpartition("\n")[2]
        raise SettingsError(said or f"execution.address: asking for the cluster ended with code {asked.returncode}")


class _Workshop:
    """The warm processes, one a kind, each started when its first task comes."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._processes: dict[str, WarmProcess] = {}
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> _Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, order: Order) -> bool:
        """Carry out one step of a candidate; say whether that worked, and in the view how it ended."""
        start = time.monotonic()
        self._view.begin(order.step)
        code = self._find(order.product.kind).run(order.candidate, carry_out, order)
        how: Ending = "interrupted" if code in _ENDED_ON_REQUEST else "failed" if code else "done"
        said: str = "interrupted; what finished is kept" if how == "interrupted" else how
        if code < 0 and how == "failed":
            said = f"its process was ended by signal {-code}, for lack of memory perhaps; finished cases are kept"
        seconds = time.monotonic() - start
        self._view.end(order.step, how)
        self._view.say(f"{order.candidate}: {order.stage}: {said}, {seconds:.1f} s")
        return code == 0

    def _find(self, kind: str) -> WarmProcess:
        with self._lock:
            if kind not in self._processes or self._processes[kind].is_gone:
                self._processes[kind] = self._stack.enter_context(WarmProcess(preload, show=self._view.show))
            return self._processes[kind]


def _make_all(
    ask: Ask,
    workshop: _Workshop,
    candidates: Mapping[str, Product],
    share: Share,
    view: View,
    judge: Judge | None,
) -> list[str]:
    """Work on the candidates that are out of date, so many at once, and judge; return those that failed."""
    first = {name: stage for name in _order(candidates) if (stage := _find_first_stage(ask, name)) is not None}
    if first and isinstance(share.params.execution, RayExecution):
        _check_cluster()
    share = replace(share, num_jobs=min(share.num_jobs, max(1, len(first))))
    view.say(f"prefetch: {len(first)} of {len(candidates)} candidates to make, {share.num_jobs} at a time")
    planned = {name: [f"{each}@{name}" for each in STAGES[STAGES.index(stage) :]] for name, stage in first.items()}
    rest = _Rest(candidates[name] for name in first)
    judged = [step for product in rest.products for step in (judge.list_steps(product) if judge else ())]
    phase = view.plan("candidates", [*sum(planned.values(), []), *judged], num_jobs=share.num_jobs, of_dvc=judged)
    if num_rest := len(candidates) - len(first):
        phase.reused.append(f"{num_rest} of {len(candidates)} candidates, as they were or by DVC's cache")
    places: SimpleQueue[int] = SimpleQueue()
    for place in range(share.num_jobs):
        places.put(place)

    def stop_unfit(product: Product) -> bool:
        if not judge or not (problems := judge.find_unfit(product)):
            return False
        why = format_line(problems[0])
        view.say(f"{product.name}: no other candidate is begun, as the reference is unfit: {why}")
        view.finish(judge.list_steps(product))
        return True

    def make(name: str) -> bool:
        place, product = places.get(), candidates[name]
        try:
            if judge and product.name in judge.unfit:
                for step in planned[name]:
                    view.drop(step)
                return True  # it has not failed
            order = share.give(name, product, place)
            is_made = _make_one(ask, workshop, view, first[name], order)
            for step in planned[name]:
                view.drop(step)
            if is_made and name == product.reference and stop_unfit(product):
                return True  # nor has this one
            if judge and not is_made:
                view.finish(judge.list_steps(product))
            elif judge and rest.is_last(product):
                judge.judge(product, order.gpus)
            return is_made
        finally:
            places.put(place)

    with view.open_phase(phase), ThreadPoolExecutor(share.num_jobs) as pool:
        try:
            for product in rest.products:
                if product.reference not in first:
                    stop_unfit(product)
            is_made = list(pool.map(make, first))
        except KeyboardInterrupt:
            if judge:
                judge.end()  # the pool waits for it
            raise
    return [name for name, made in zip(first, is_made, strict=True) if not made]


class _Rest:
    """Counts the candidates of each product that are still to be made; several threads may ask."""

    def __init__(self, owners: Iterable[Product]) -> None:
        """Count them.

        Args:
            owners: the product of each candidate.
        """
        self._lock, self._num, self.products = threading.Lock(), Counter[str](), list[Product]()
        for product in owners:
            if not self._num[product.name]:
                self.products.append(product)
            self._num[product.name] += 1

    def is_last(self, product: Product) -> bool:
        """Take one of a product as made, and say whether it was the last."""
        with self._lock:
            self._num[product.name] -= 1
            return not self._num[product.name]


def _order(candidates: Mapping[str, Product]) -> list[str]:
    """Return the names in the order of params.yaml, but last those that servers answer for.

    Servers take no turns: on a few cores others are timed before any works. Within a product the order stays, in which
    the reference is first: others take over what it has made.
    """
    return sorted(candidates, key=lambda name: KINDS[candidates[name].kind].has_servers)


def _find_first_stage(ask: Ask, name: str) -> str | None:
    """Return the first stage of a candidate that DVC would run; None: none, and what its cache has is in place."""
    return next((stage for stage in STAGES if ask(f"{stage}@{name}") == "run"), None)


def _make_one(ask: Ask, workshop: _Workshop, view: View, first: str, order: Order) -> bool:
    """Make a candidate, and evaluate it where DVC would, now that it is made; say whether that worked."""
    if first == "optimize":
        if not workshop.run(replace(order, stage="optimize")):
            return False
        try:
            if ask(f"evaluate@{order.candidate}") != "run":
                return True
        except EvidenceError as error:  # DVC can't say
            view.say(f"{order.candidate}: {format_line(str(error))}")
            return False
    return workshop.run(replace(order, stage="evaluate"))
