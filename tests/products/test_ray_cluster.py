"""The driver of a Ray cluster, with a Ray that is played: who gets which shard, and what a failure costs.

On real nodes, with real faults: `python -m benchmarks.ray_faults`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import CheckpointError, EngineError, EvidenceError, SettingsError
from pipeline.products import prefetch, ray_cluster, ray_worker
from pipeline.products.params import find_owner, list_project_files, load_params, parse_params, read_settings
from pipeline.products.ray_cluster import MAX_FAILED_STARTS, MAX_FAILURES, _finish, _prepare, _Run, _run_shards
from pipeline.products.ray_earlier import EarlierShards
from pipeline.products.ray_replica import RemoteReplica
from pipeline.products.ray_worker import Order, Replica, SentFile, check_received, link, receive
from pipeline.records.record_files import write_record
from pipeline.running.progress_view import View
from pipeline.running.shards import Attempt, Shard, ShardEval, find_count, read_attempts
from pipeline.running.staleness import Plan
from pipeline.settings.base import Product
from pipeline.settings.execution import RayExecution
from stages import evaluate
from tests.paths import ROOT


class RayError(Exception):
    """Whatever goes wrong with a call."""


class RayActorError(RayError):
    """The process of an actor ended."""


class ObjectLostError(RayError):
    """A node ended, and on it a result that was not fetched yet."""


class RayTaskError(RayError):
    """A call raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class PlayedActor:
    """A replica whose calls end at once, as a plan says."""

    def __init__(self, host: str, run: Callable[[str, int], Any]) -> None:
        self.host, self.is_alive = host, True
        self._new: list[tuple[str, int, bytes]] = []
        self.earlier: list[dict[str, bytes]] = []
        self.prepared: list[tuple[int, int]] = []
        self.finished: list[bytes] | None = None
        calls = {
            "look": lambda *_: (host, True),
            "begin": self._begin,
            "open": lambda begun: self._open(PlayedRay().get(begun)),
            "run": self._run,
            "read_new": self._read_new,
            "prepare": self._prepare,
            "finish": self._finish,
            "list_made": lambda *_: ["evaluation.json"],
            "read_made": lambda folder, path, offset: b"{}"[offset:],
        }
        self._plan = run
        for name, call in calls.items():
            setattr(self, name, SimpleNamespace(remote=lambda *given, call=call: Reference(self, call, given)))

    def _begin(self, *_: Any) -> None:
        """Work in the project's folder."""

    def _open(self, _begun: None) -> None:
        """Be ready."""

    def _run(self, number: int, count: int, earlier: dict[str, bytes]) -> int:
        self.earlier.append(earlier)
        self._new.append((f"{number}-of-{count}/{self.host}/calls.jsonl", 0, f'"{number}"\n'.encode()))
        self._plan(self.host, number)
        return 1

    def _prepare(self, number: int, count: int) -> bytes | None:
        self.prepared.append((number, count))
        return self._plan(self.host, -number)

    def _finish(self, _files: list[str], _server: Any, prepared: list[bytes]) -> None:
        self.finished = prepared

    def _read_new(self, known: dict[str, int]) -> list[tuple[str, int, bytes]]:
        return [entry for entry in self._new if entry[0] not in known]


@dataclass(eq=False)
class Reference:
    """What stands for the result of a call."""

    actor: PlayedActor
    call: Callable[..., Any]
    given: tuple[Any, ...]


class PlayedRay:
    """As much of Ray as the driver calls."""

    exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Say that the first is done."""
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        """Do what the call does."""
        if not reference.actor.is_alive:
            raise RayActorError
        try:
            return reference.call(*reference.given)
        except RayActorError:
            reference.actor.is_alive = False
            raise
        except (ObjectLostError, RayTaskError):  # the latter of a call whose result is given to this one
            raise
        except Exception as error:
            raise RayTaskError(error) from None

    def kill(self, actor: Any) -> None:
        """End an actor."""
        actor.is_alive = False

    def cluster_resources(self) -> dict[str, float]:
        """Say that there is room for all."""
        return {"CPU": 8.0}


def run_shards(
    folder: Path, actors: list[PlayedActor], num_shards: int, monkeypatch: pytest.MonkeyPatch, *, at_once: int = 1
) -> tuple[_Run, list[RemoteReplica]]:
    """Evaluate; return where it stands at the end, and the replicas that still work."""
    execution = RayExecution(kind="ray", num_workers=len(actors))
    shards = deque(Shard(number, num_shards) for number in range(1, num_shards + 1))
    earlier, order = EarlierShards(folder / "shards/model"), Order("model", folder.as_posix(), {})
    run = _Run(PlayedRay(), execution, order, at_once, num_shards, shards, earlier)
    spare = iter([PlayedActor(f"spare-{i}", actors[0]._plan) for i in range(20)])
    monkeypatch.setattr(ray_cluster, "start_replica", lambda *_: RemoteReplica(PlayedRay(), next(spare)))
    monkeypatch.setattr(ray_cluster, "_POLL_S", 0.0)
    project: Any = SimpleNamespace(root="/", token="t")
    return run, _run_shards(run, [RemoteReplica(PlayedRay(), actor) for actor in actors], project)


def run_all(
    folder: Path, actors: list[PlayedActor], num_shards: int, monkeypatch: pytest.MonkeyPatch, *, at_once: int = 1
) -> tuple[_Run, set[str]]:
    """Evaluate; return where it stands at the end, and the files that the driver has."""
    run, _ = run_shards(folder, actors, num_shards, monkeypatch, at_once=at_once)
    return run, {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*.jsonl")}


def works(_host: str, _number: int) -> None:
    """Finish every shard."""


def test_each_shard_is_run_once_where_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, files = run_all(tmp_path, [PlayedActor("a", works), PlayedActor("b", works)], 5, monkeypatch)
    assert len(files) == 5 and not run.failures and not run.num_dead


def test_a_replica_has_as_many_shards_at_once_as_its_kind_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each shard servers were idle: the last cases of one are few."""
    at_work: list[int] = []
    wait = PlayedRay.wait

    def count(ray: PlayedRay, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        hosts = [reference.actor.host for reference in references if reference.call == reference.actor._run]
        at_work.append(max(map(hosts.count, hosts), default=0))
        return wait(ray, references, timeout)

    monkeypatch.setattr(PlayedRay, "wait", count)
    run, files = run_all(tmp_path, [PlayedActor("a", works), PlayedActor("b", works)], 6, monkeypatch, at_once=2)
    assert len(files) == 6 and not run.failures and max(at_work) == 2


@pytest.mark.parametrize("end", [RayActorError, EngineError])
def test_what_is_beside_a_shard_that_fails_is_evaluated_elsewhere_and_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: type[Exception]
) -> None:
    ended: list[int] = []

    def fail_once(host: str, number: int) -> None:
        if host == "a" and number == 1:
            ended.append(number)
            raise end("the server died")

    actors = [PlayedActor("a", fail_once), PlayedActor("b", fail_once)]
    run, files = run_all(tmp_path, actors, 4, monkeypatch, at_once=2)
    assert ended == [1] and {name.split("/")[0] for name in files} >= {f"{n}-of-4" for n in (1, 2, 3, 4)}
    assert run.failures == {Shard(1, 4): 1} and run.num_dead == (end is RayActorError) and run.num_retries == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  shard ")]
    assert len(said) == 2 and said[0].startswith("  shard 1/4: a: ") and "beside it; given to another" in said[1]


def test_the_shard_that_kills_its_process_is_found_and_no_other_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both that were there end with the process, and the innocent one was heard of first, time after time."""
    pending: list[tuple[str, int]] = []
    wait = PlayedRay.wait

    def note(ray: PlayedRay, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        shards = [reference for reference in references if reference.call == reference.actor._run]
        pending[:] = [(reference.actor.host, reference.given[0]) for reference in shards]
        return wait(ray, references, timeout)

    def die_beside_two(host: str, _number: int) -> None:
        if (host, 2) in pending:
            raise RayActorError

    monkeypatch.setattr(PlayedRay, "wait", note)
    actors = [PlayedActor(host, die_beside_two) for host in ("a", "b")]
    with pytest.raises(EngineError, match=rf"^model: shard 2/4 failed {MAX_FAILURES} times"):
        run_shards(tmp_path, actors, 4, monkeypatch, at_once=2)
    assert len(list((tmp_path / "shards/model").glob("*-of-4/*/calls.jsonl"))) >= 1


def test_shards_are_kept_for_replicas_that_still_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one took two, and more were started than there was work for."""
    actors = [PlayedActor(host, works) for host in ("a", "b")]
    _, workers = run_shards(tmp_path, actors, 2, monkeypatch, at_once=2)
    assert [len(actor.earlier) for actor in actors] == [1, 1]
    assert [worker.host for worker in workers] == ["a", "b"]


@pytest.mark.parametrize(
    ("num_starting", "num_ready", "num_waiting", "num_missing"),
    [(0, 0, 0, 1), (1, 0, 0, 0), (2, 1, 3, 1), (0, 2, 3, 3), (0, 2, 20, 6), (0, 2, 0, 0)],
)
def test_no_more_replicas_are_started_than_have_work_and_room(
    tmp_path: Path, num_starting: int, num_ready: int, num_waiting: int, num_missing: int
) -> None:
    """There is room for eight."""
    waiting = deque(Shard(number, 20) for number in range(1, num_waiting + 1))
    execution, order = RayExecution(kind="ray"), Order("model", tmp_path.as_posix(), {})
    run = _Run(PlayedRay(), execution, order, 2, 20, waiting, EarlierShards(tmp_path))
    assert ray_cluster._count_missing(run, num_starting + num_ready, num_ready) == num_missing


def test_one_that_ran_a_shard_ends_the_run_and_no_idle_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle one would load or serve the candidate for it once more; it was ready first."""
    actors = [PlayedActor("a", works), PlayedActor("idle", works)]
    _, workers = run_shards(tmp_path, actors, 1, monkeypatch)
    assert [worker.host for worker in workers] == ["a", "idle"], "the first ends it"


@pytest.mark.parametrize("end", [RayActorError, ObjectLostError])
def test_a_shard_of_a_dead_worker_goes_on_elsewhere_with_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: type[RayError]
) -> None:
    def die_at_two(_host: str, number: int) -> None:
        if number == 2:
            raise end

    other = PlayedActor("b", works)
    part = tmp_path / "shards/model/2-of-3/a/calls.jsonl"
    part.parent.mkdir(parents=True)
    part.write_bytes(b'"half"\n"torn')
    run, files = run_all(tmp_path, [PlayedActor("a", die_at_two), other], 3, monkeypatch)
    assert run.num_dead <= 1 and {name.split("/")[0] for name in files} == {"1-of-3", "2-of-3", "3-of-3"}
    assert all(b"torn" not in entries for given in other.earlier for entries in given.values())


def test_a_shard_that_fails_everywhere_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_two(_host: str, number: int) -> None:
        if number == 2:
            raise CheckpointError("models/a: expected weights, found none")

    actors = [PlayedActor(name, fail_at_two) for name in "abc"]
    with pytest.raises(
        EngineError, match=rf"model: shard 2/3 failed {MAX_FAILURES} times, last on .*: models/a: "
    ) as e:
        run_all(tmp_path, actors, 3, monkeypatch)
    assert "\n" not in str(e.value)


def test_a_failed_shard_is_not_given_to_the_same_host_while_there_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose disk is full would take one shard after another down."""
    tried: list[tuple[str, int]] = []

    def fill(host: str, number: int) -> None:
        tried.append((host, number))
        if host == "full":
            raise OSError(28, "No space left on device")

    _, files = run_all(tmp_path, [PlayedActor("full", fill), PlayedActor("b", fill)], 4, monkeypatch)
    assert [host for host, _ in tried].count("full") <= 1 and len(files) >= 4


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ModuleNotFoundError("No module named 'torch'"), "expected the project's environment on this node: No module"),
        (RuntimeError("CUDA driver\nis too old"), "RuntimeError: CUDA driver is too old; what finished is kept, run"),
    ],
)
def test_where_no_replica_can_start_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Exception, said: str
) -> None:
    """It tried for ever."""

    def refuse(*_: Any) -> None:
        raise cause

    monkeypatch.setattr(PlayedActor, "_begin", refuse)
    with pytest.raises(EngineError, match=said):
        run_all(tmp_path, [PlayedActor("a", works), PlayedActor("b", works)], 3, monkeypatch)


def test_a_node_that_can_t_open_the_candidate_is_given_up_and_blames_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each shard failed on it once, and a server was waited for each time; three nodes like it ended the run."""

    def open_it(actor: PlayedActor, _begun: None) -> None:
        if actor.host != "b":
            raise EngineError("server server-0: not ready after 120 s")

    monkeypatch.setattr(PlayedActor, "_open", open_it)
    run, files = run_all(tmp_path, [PlayedActor(host, works) for host in "abcde"], 20, monkeypatch)
    assert len(files) == 20 and not run.failures and not run.num_retries
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "  a: server server-0: not ready after 120 s; failed starts: 1"
    assert said[-1].endswith(f"not ready after 120 s; failed starts: {len(said)}, no more are tried")
    assert len(said) <= 4 + MAX_FAILED_STARTS - 1  # those of the first five, and what was tried in their place


def test_one_that_still_starts_when_all_is_done_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on to load its candidate beside what follows the shards, in the memory of that."""
    wait = PlayedRay.wait

    def wait_for_others(ray: PlayedRay, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Never say that the slow one is done."""
        return wait(ray, [reference for reference in references if reference.actor is not slow], timeout)

    monkeypatch.setattr(PlayedRay, "wait", wait_for_others)
    slow = PlayedActor("slow", works)
    _, replicas = run_shards(tmp_path, [slow, PlayedActor("b", works)], 4, monkeypatch)
    assert [replica.host for replica in replicas] == ["b"] and not slow.is_alive


def test_nothing_is_opened_where_no_shard_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the shards starts servers of its own where there are drafts: they were started twice."""
    opened: list[str] = []
    monkeypatch.setattr(PlayedActor, "_open", lambda actor, _begun: opened.append(actor.host))
    _, replicas = run_shards(tmp_path, [PlayedActor("a", works)], 0, monkeypatch)
    assert [replica.host for replica in replicas] == ["a"] and not opened


def test_one_that_is_lost_at_work_is_replaced_after_nodes_were_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it worked there is room again; the run would wait for nobody."""
    has_died = threading.Event()

    def open_it(actor: PlayedActor, _begun: None) -> None:
        if actor.host != "b" and not has_died.is_set():
            raise EngineError("server server-0: not ready after 120 s")

    def die_once(_host: str, number: int) -> None:
        if number == 20 and not has_died.is_set():
            has_died.set()
            raise RayActorError

    monkeypatch.setattr(PlayedActor, "_open", open_it)
    run, files = run_all(tmp_path, [PlayedActor(host, die_once) for host in "abcde"], 20, monkeypatch)
    assert {name.split("/")[0] for name in files} == {f"{number}-of-20" for number in range(1, 21)}
    assert run.num_dead == 1 and run.num_retries == 1


def play_prepare(*plans: Callable[[str, int], Any], idle: int = 0) -> tuple[list[bytes], list[RemoteReplica]]:
    """Have replicas that ran a shard prepare, each by its plan, and some that ran none."""
    workers = [
        RemoteReplica(PlayedRay(), PlayedActor(f"host-{i}", plan), host=f"host-{i}", known={"x": 0})
        for i, plan in enumerate(plans)
    ]
    workers += [RemoteReplica(PlayedRay(), PlayedActor("idle", works), host="idle") for _ in range(idle)]
    run: Any = SimpleNamespace(ray=PlayedRay())
    return _prepare(run, workers), workers


def name_part(_host: str, number: int) -> bytes:
    """Prepare a part, which is its number."""
    return str(-number).encode()


def dies(_host: str, _number: int) -> None:
    """End the process."""
    raise RayActorError


def loses(_host: str, _number: int) -> None:
    """End the node before its result is fetched."""
    raise ObjectLostError


def fails(_host: str, _number: int) -> None:
    """Raise what a user can act on."""
    raise EngineError("the server died")


def test_what_follows_the_shards_is_divided_among_those_that_ran_one() -> None:
    prepared, workers = play_prepare(name_part, name_part, idle=1)
    assert prepared == [b"1", b"2"] and [worker.actor.prepared for worker in workers] == [[(1, 2)], [(2, 2)], []]
    assert play_prepare(works, works)[0] == [], "a kind that divides nothing"


def test_one_finishes_with_what_all_prepared_and_the_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(_host: str, number: int) -> bytes:
        return str(number).encode()

    actors = [PlayedActor(host, prepare) for host in ("a", "b")] + [PlayedActor("idle", works)]
    run, workers = run_shards(tmp_path, actors, 2, monkeypatch)
    project: Any = SimpleNamespace(server=None)
    _finish(run, workers, project)
    assert [actor.finished for actor in actors] == [[b"-1", b"-2"], None, None]
    assert [actor.is_alive for actor in actors] == [True, False, False]
    assert (tmp_path / "evaluations/model/evaluation.json").read_bytes() == b"{}" and not run.folder.exists()


@pytest.mark.parametrize("plan", [dies, loses, fails])
@pytest.mark.parametrize("place", [0, 1])
def test_a_replica_that_fails_after_the_shards_leaves_its_part_to_another(
    capsys: pytest.CaptureFixture[str], plan: Any, place: int
) -> None:
    plans = [name_part, name_part]
    plans[place] = plan
    prepared, workers = play_prepare(*plans)
    assert prepared == [str(2 - place).encode()] and [worker.host for worker in workers] == [f"host-{1 - place}"]
    assert f"  host-{place}: " in (said := capsys.readouterr().err) and said.count("\n") == 1


@pytest.mark.parametrize("plan", [dies, fails])
def test_the_last_replica_that_fails_after_the_shards_ends_it_in_one_line(plan: Any) -> None:
    with pytest.raises(EngineError, match=r"^host-0: .*; what finished is kept, run `dvc repro` to go on$"):
        play_prepare(plan)


def test_workers_are_as_many_as_there_are_resources_for() -> None:
    execution = RayExecution(kind="ray", resources={"GPU": 2, "CPU": 4})
    assert execution.count_workers({"GPU": 5, "CPU": 64}) == 2
    assert execution.count_workers({"CPU": 64}) == 1
    assert RayExecution(kind="ray", num_workers=7).count_workers({}) == 7


def test_a_replica_for_which_the_cluster_has_no_node_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray waits for one without a word."""
    execution = RayExecution(kind="ray", resources={"GPU": 1, "CPU": 4})
    ray_cluster._tell_missing(execution, {"GPU": 1.0, "CPU": 4.0})
    assert not capsys.readouterr().err
    ray_cluster._tell_missing(execution, {"CPU": 64.0})
    assert "a replica needs GPU 1, and the cluster has GPU 0: waiting for a node" in capsys.readouterr().err


def write_attempt(folder: Path, name: str, number: int, key: str, *, is_finished: bool = True) -> Path:
    """Write an attempt at one of three shards."""
    path = folder / "shards/model" / f"{number}-of-3" / name / "attempt.json"
    path.parent.mkdir(parents=True)
    made = {"calls": ShardEval(key=key)}
    attempt = Attempt(
        candidate="model",
        number=number,
        count=3,
        host="a",
        fingerprint="f",
        facts={},
        evals=made,
        is_finished=is_finished,
    )
    write_record(path, attempt)
    return path.parent


def start_again(folder: Path) -> _Run:
    """Return a run that begins where another ended, with no shard that waits."""
    execution, order = RayExecution(kind="ray", num_workers=1), Order("model", folder.as_posix(), {})
    return _Run(PlayedRay(), execution, order, 1, 3, deque(), EarlierShards(folder / "shards/model"))


def test_shards_of_other_settings_are_evaluated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were refused when all the others had been evaluated, which were then removed with them."""
    stale = [write_attempt(tmp_path, "1", 1, "old"), write_attempt(tmp_path, "1", 3, "old", is_finished=False)]
    kept = write_attempt(tmp_path, "1", 2, "new")
    run = start_again(tmp_path)
    write_attempt(tmp_path, "2", 3, "new", is_finished=False)
    ray_cluster._drop_stale(run)
    assert all(path.is_dir() for path in stale), "nothing is known before a shard is finished"
    fresh = write_attempt(tmp_path, "3", 3, "new")
    ray_cluster._drop_stale(run)
    assert list(run.waiting) == [Shard(1, 3)]
    assert not any(path.exists() for path in stale) and kept.is_dir() and fresh.is_dir()
    assert "1 shards of an earlier run had other settings, cases or code" in capsys.readouterr().err


def test_a_shard_that_was_finished_in_both_ways_waits_not_again(tmp_path: Path) -> None:
    write_attempt(tmp_path, "1", 1, "old")
    write_attempt(tmp_path, "2", 1, "new")
    run = start_again(tmp_path)
    write_attempt(tmp_path, "3", 3, "new")
    ray_cluster._drop_stale(run)
    assert not run.waiting and len(read_attempts(run.folder)) == 2


def test_a_finished_shard_shows_which_earlier_ones_are_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[_Run] = []
    monkeypatch.setattr(ray_cluster, "_drop_stale", asked.append)
    run, _ = run_all(tmp_path, [PlayedActor("a", works)], 2, monkeypatch)
    assert asked == [run, run]


def test_shards_of_two_numbers_are_told_before_any_work(tmp_path: Path) -> None:
    """All were evaluated once more, and then refused."""
    for name in ("1-of-2", "2-of-2", "1-of-2-old"):
        (tmp_path / name).mkdir()
    assert find_count(tmp_path) == 2
    (tmp_path / "3-of-4").mkdir()
    with pytest.raises(EvidenceError, match="expected shards of one whole, found some of 2 and some of 4"):
        find_count(tmp_path)


def test_without_ray_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with (
        pytest.raises(SettingsError, match=r"execution\.kind: ray is not installed; `pip install"),
        ray_cluster.connect(RayExecution(kind="ray")),
    ):
        pass


def test_a_cluster_that_is_not_there_is_said_once_and_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of thirty candidates said it, at work."""
    said = "ray.py: is not here"
    (tmp_path / "ray.py").write_text(f"raise ImportError({said!r})\n")
    text = (ROOT / "params.yaml").read_text()
    assert "kind: local, num_workers: auto" in text
    (tmp_path / "params.yaml").write_text(text.replace("kind: local, num_workers: auto", "kind: ray, num_workers: 2"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    params, asked = load_params(), list[str]()
    unused: Any = None
    share = prefetch.Share(params, {}, 2, ())

    def ask(step: str) -> Plan:
        asked.append(step)
        return "run"

    with (
        View(tmp_path / "facts") as view,
        pytest.raises(SettingsError, match=r"^execution\.kind: ray is not installed; `pip install"),
    ):
        prefetch._make_all(ask, unused, {"shots": params.products["shots"]}, share, view, None)
    assert asked == ["optimize@shots"]


def test_a_file_comes_over_in_chunks_whole_or_not_at_all(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    target = tmp_path / "folder/file"
    receive(target, lambda offset: content[offset : offset + 100])
    assert target.read_bytes() == content and list(target.parent.iterdir()) == [target]
    check_received(target, SentFile("file", hashlib.sha256(content).hexdigest()))
    link(target, tmp_path / "linked")
    assert (tmp_path / "linked").read_bytes() == content
    with pytest.raises(OSError, match=r"file: expected content 000000000000, got \w+: it changed meanwhile"):
        check_received(target, SentFile("file", "0" * 64))
    assert not target.exists()


def test_a_replica_sends_whole_entries_from_where_the_driver_is(tmp_path: Path) -> None:
    replica = Replica()
    replica._order, replica._build = Order("model", "build/p", {}), tmp_path
    folder = tmp_path / "shards/model/1-of-2/a"
    folder.mkdir(parents=True)
    (folder / "empty.jsonl").touch()
    entries = folder / "calls.jsonl"
    entries.write_bytes(b"1\n2\n3 torn")
    calls, empty = "1-of-2/a/calls.jsonl", "1-of-2/a/empty.jsonl"
    first = [(calls, 0, b"1\n2\n"), (empty, 0, b"")]
    assert replica.read_new({}) == first and replica.read_new({}) == first, "an answer that was lost comes again"
    assert replica.read_new({calls: 4, empty: 0}) == []
    with entries.open("ab") as file:
        file.write(b" no more\n")
    assert replica.read_new({calls: 4, empty: 0}) == [(calls, 4, b"3 torn no more\n")]


def test_an_entry_longer_than_a_chunk_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture at 4K is one; nothing behind it came, and the shard counted as finished."""
    monkeypatch.setattr(ray_worker, "CHUNK", 8)
    replica = Replica()
    replica._order, replica._build = Order("model", "build/p", {}), tmp_path
    path = tmp_path / "shards/model/1-of-2/a/pictures.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1\n" + b"2" * 30 + b"\n3\n")
    received, name = b"", "1-of-2/a/pictures.jsonl"
    while new := replica.read_new({name: len(received)} if received else {}):
        received += new[0][2]
    assert received == path.read_bytes()


def test_a_process_that_dies_in_a_replica_is_its_kinds_own_line_and_the_next_shard_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came to the driver raw, who took it for a bug and ended the run with a traceback."""
    starts = list[int]()

    @contextlib.contextmanager
    def open_replica() -> Iterator[Any]:
        starts.append(len(starts))
        try:
            yield SimpleNamespace(run=die if starts == [0] else lambda shard: 7)
        except BrokenProcessPool:
            raise EngineError("shots: a process that draws died") from None

    def die(shard: Any) -> int:
        raise BrokenProcessPool("A child process terminated abruptly")

    replica = Replica()
    replica._order, replica._build = Order("shots", "build/shots", {}), tmp_path
    monkeypatch.setattr(replica, "_do", lambda method: open_replica())
    with pytest.raises(EngineError, match=r"^shots: a process that draws died$"):
        replica.run(1, 2, {})
    assert replica.run(2, 2, {}) == 7 and starts == [0, 1]


def make_replica(folder: Path, open_it: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Replica:
    """Return a replica that opens what it is told to."""
    replica = Replica()
    replica._order, replica._build = Order("model", "build/p", {}), folder
    monkeypatch.setattr(replica, "_do", lambda method: open_it())
    return replica


def test_a_replica_that_can_t_open_a_candidate_tries_it_once_for_all_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server was started, and waited for as long again, before the driver heard of the first."""
    opened: list[int] = []

    def fail() -> Any:
        opened.append(1)
        threading.Event().wait(0.2)
        raise EngineError("server server-0: not ready after 120 s")

    replica = make_replica(tmp_path, fail, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(replica.run, number, 2, {}) for number in (1, 2)]
        assert [str(end.exception()) for end in ends] == ["server server-0: not ready after 120 s"] * 2
    assert opened == [1]


def test_a_shard_that_fails_closes_nothing_under_the_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    has_failed = threading.Event()

    @contextlib.contextmanager
    def open_it() -> Iterator[Any]:
        try:
            yield SimpleNamespace(run=run)
        finally:
            events.append("closed")

    def run(shard: Shard) -> int:
        if shard.number == 1:
            raise EvidenceError("a case could not be judged")
        assert has_failed.wait(20)
        events.append("done")
        return 1

    replica = make_replica(tmp_path, open_it, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(replica.run, 2, 2, {})
        while replica._open is None:
            time.sleep(0.01)
        with pytest.raises(EvidenceError, match="a case could not be judged"):
            replica.run(1, 2, {})
        has_failed.set()
        assert beside.result() == 1
    assert events == ["done"]


def test_a_replica_hands_on_its_part_and_what_others_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    opened = SimpleNamespace(run=lambda shard: 1, prepare=lambda *part: given.append(part), finish=given.append)
    replica = Replica()
    replica._order, replica._build = Order("model", "build/p", {}), tmp_path
    monkeypatch.setattr(replica, "_do", lambda method: contextlib.nullcontext(opened))
    replica.run(1, 1, {})
    assert replica.prepare(2, 3) is None, "of a kind that divides nothing"
    replica.finish([], None, [b"part"])
    assert given == [(2, 3), [b"part"]]


def test_a_node_is_sent_what_a_candidate_needs_and_no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    params = load_params()
    product = find_owner(params, "agent", kind=Product)
    sent = {path.as_posix() for path in list_project_files(params, product, "agent")}
    assert {"params.yaml", "models/agent/config.json", "pipeline/errors.py", "stages/evaluate.py"} <= sent
    assert not any(path.startswith(("models/product-shots/", "models/people-hard/", ".", "build/env")) for path in sent)


def test_a_node_is_sent_the_draft_of_a_candidate_though_it_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was left out as another candidate's checkpoint, and every replica ended for the lack of it."""
    monkeypatch.chdir(ROOT)
    data = read_settings(Path("params.yaml"))
    draft = {"kind": "speculative", "method": "draft_model", "draft": "models/agent-draft", "num_speculative_tokens": 3}
    for name, checkpoint, steps in (("fast", "models/agent", [draft]), ("small", "models/agent-draft", [])):
        data["candidates"][name] = {"product": "agent", "checkpoint": checkpoint, "steps": steps}
    params = parse_params(data)
    sent = {name: list_project_files(params, params.products["agent"], name) for name in ("agent", "fast", "small")}
    drafts = {name: [path for path in paths if "agent-draft" in path.parts] for name, paths in sent.items()}
    assert drafts["fast"] == drafts["small"] != [] == drafts["agent"]


def test_a_node_is_sent_what_links_hold_that_settings_name_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkpoint, an evalset or pictures on another disk were left out: each replica ended for the lack of them."""
    project, disk = tmp_path / "project", tmp_path / "disk"
    for name in ("weights/config.json", "pictures/one.png", "archive/huge.bin", "blob", "tasks/card.yaml"):
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text("data")
    for path, place in (
        ("models/agent", "weights"),
        ("evalsets/prose/images", "pictures"),
        ("evalsets/prose/cases.jsonl", "blob"),  # as the cache of DVC and that of the hub link files
        ("evalsets/prose/images/again", "pictures"),
        ("evalsets/choices", "tasks"),
        ("archive", "archive"),
    ):
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).symlink_to(disk / place)
    params = parse_params(read_settings(ROOT / "params.yaml"))
    monkeypatch.chdir(project)
    sent = {path.as_posix() for path in list_project_files(params, params.products["agent"], "agent")}
    wanted = {"models/agent/config.json", "evalsets/prose/images/one.png", "evalsets/prose/cases.jsonl"}
    assert sent == wanted | {"evalsets/choices/card.yaml"}


def test_a_candidate_that_is_not_built_is_said_here_and_starts_no_replica(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three replicas were started for it, one after another, and each said it."""
    text = (ROOT / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text.replace("kind: local, num_workers: auto", "kind: ray, num_workers: 2"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_cluster, "connect", lambda _: pytest.fail("a cluster was asked"))
    monkeypatch.setattr(ray_cluster, "load_params", lambda: pytest.fail("params.yaml was read twice"))
    with pytest.raises(EvidenceError, match=r"build/shots/candidates/shots/candidate\.json: expected"):
        evaluate.main(["shots"])
