"""Which stages are out of date by dvc.lock, and why, where weights and records are not there. The only importer of DVC.

`open_project` says what `dvc repro` would do with one stage in this workspace, and restores what DVC would restore;
`list_due` says which stages it would run, and `note_runs` has DVC note those that were run without it. All else is for
a clone without data.
What is asked of DVC is data: how it resolves dvc.yaml, and whether a file or a setting differs from what dvc.lock says
of it. A stage is out of date when
- its entry in dvc.lock is missing, or names another command, or other settings, dependencies or outputs than dvc.yaml;
- a setting, a dependency or an output that is here is another one;
- a dependency that is not here is not what its own stage's entry says, or no stage makes it;
- an output is not here that git keeps (`cache: false`);
- dvc.yaml takes it from what DVC watches: `frozen`, a `wdir` of its own, or no dependency at all;
- a stage that it depends on is out of date.
Of a folder that several stages fill dvc.lock has one digest: size and number of files must be theirs together.
Whoever writes dvc.lock to match is not seen here; `release/recipe.py` compares with what went out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import networkx
from dvc.dependency import ParamsDependency
from dvc.lock import LockError
from dvc.output import Output
from dvc.repo import Repo
from dvc.repo.reproduce import plan_repro
from dvc.rwlock import rwlock
from dvc.stage import PipelineStage, Stage
from dvc.stage.cache import RunCacheNotFoundError
from dvc_data.hashfile.hash_info import HashInfo
from ruamel.yaml import YAML

from pipeline.errors import EvidenceError

T = TypeVar("T")

Entry = Mapping[str, Any]  # of a stage, in dvc.lock
Plan = Literal["skip", "restored", "run"]  # restored: from DVC's cache
_STAGES, _LOCK = "dvc.yaml", "dvc.lock"
RWLOCK = Path(".dvc/tmp/rwlock")  # DVC's list of who reads and writes what


def find_stale(root: Path, *, runs_here: Collection[str]) -> dict[str, list[str]]:
    """Return the stages that are out of date in the order in which they run, each with what is wrong with itself.

    Args:
        root: of the project.
        runs_here: stages that are run anyway: their contents may differ from dvc.lock, their definition may not.

    Raises:
        EvidenceError: DVC can't say.
    """
    return _ask(root, lambda repo: _find_stale(repo, runs_here))


def read_commands(root: Path) -> dict[str, list[str]]:
    """Return the commands of each stage, those of a `foreach` resolved.

    Raises:
        EvidenceError: DVC can't say.
    """
    return _ask(
        root,
        lambda repo: {
            _name(stage): stage.cmd if isinstance(stage.cmd, list) else [str(stage.cmd)] for stage in repo.index.stages
        },
    )


def read_own_commands(root: Path, name: str) -> list[str]:
    """Return the commands of a stage that no `foreach` makes, from dvc.yaml itself: DVC reads all of dvc.lock first.

    Raises:
        EvidenceError: it is not there.
    """
    commands = _explain(root, lambda: YAML(typ="safe").load((root / _STAGES).read_text("utf-8"))["stages"][name]["cmd"])
    return commands if isinstance(commands, list) else [str(commands)]


def list_due(targets: Sequence[str] = ()) -> list[str]:
    """Return the stages that `dvc repro` would run or restore here and now, in its order, as far as can be said ahead.

    One whose inputs are made anew is among them, though they may come out as they were.

    Args:
        targets: stages that are asked for, with all that they depend on; none: all.

    Raises:
        EvidenceError: DVC can't say.
    """
    _silence()
    with contextlib.ExitStack() as stack:
        repo = _explain(Path(), lambda: stack.enter_context(Repo("", _wait_for_lock=True)))
        return _explain(Path(), lambda: _list_due(repo, targets))


def _list_due(repo: Repo, targets: Sequence[str]) -> list[str]:
    graph = repo.index.graph
    wanted = [stage for stage in repo.index.stages if _name(stage) in targets]
    due: dict[Stage, str] = {}
    with repo.lock:
        _forget_killed(repo)
        for stage in plan_repro(graph, wanted):
            is_behind = any(other in due and not other.always_changed for other in graph.successors(stage))
            if is_behind or (not stage.frozen and stage.changed()):
                due[stage] = _name(stage)
    return list(due.values())


def _forget_killed(repo: Repo) -> None:
    """Take killed processes off DVC's list of readers and writers, for which it has a warning for each file later."""
    hardlink = repo.config["core"].get("hardlink_lock", False)
    with contextlib.suppress(LockError), rwlock(repo.tmp_dir, repo.fs, "quantgate", [], [repo.root_dir], hardlink):
        pass  # a LockError: others are at work, and DVC will say so where it matters


@contextlib.contextmanager
def open_project() -> Iterator[Callable[[str], Plan]]:
    """Give a function that says what `dvc repro` would do here and now with a stage; each can be asked of once.

    What DVC's cache has of it is restored, as it would be then: stages that depend on it may be asked of next. The
    project is the one in the current folder: DVC looks into its cache from there. What earlier stages left in the
    workspace counts, as for DVC itself. Several threads may ask.

    Raises:
        EvidenceError: DVC can't say; the function raises it, too, while another DVC works on the same files.
    """
    _silence()
    root, lock = Path(), threading.Lock()
    with contextlib.ExitStack() as stack:
        repo = _explain(root, lambda: stack.enter_context(Repo(str(root), _wait_for_lock=True)))
        stages = {_name(stage): stage for stage in _explain(root, lambda: repo.index.stages)}

        def plan(name: str) -> Plan:
            with lock:
                return _explain(root, lambda: _plan(repo, stages[name]))

        yield plan


def note_runs(names: Collection[str]) -> None:
    """Have DVC note stages as run, whose outputs lie where they write them: as `dvc commit --force` does for one.

    dvc.lock is written once for all of them.

    Raises:
        EvidenceError: DVC can't note them; dvc.lock is as it was.
    """
    _silence()
    with contextlib.ExitStack() as stack:
        repo = _explain(Path(), lambda: stack.enter_context(Repo("", _wait_for_lock=True)))
        _explain(Path(), lambda: _note_runs(repo, names))


def _note_runs(repo: Repo, names: Collection[str]) -> None:
    with repo.lock:  # read within it, too: another DVC may be writing dvc.lock
        noted = [stage for stage in repo.index.stages if _name(stage) in names]
        for stage in noted:
            stage.save()
            stage.commit()
        for file in {stage.path: stage.dvcfile for stage in noted}.values():
            file.dump_stages([stage for stage in noted if stage.path == file.path], update_pipeline=False)


def _plan(repo: Repo, stage: Stage) -> Plan:
    """Ask, and restore, as `Stage.reproduce` and `Stage.run` do."""
    with repo.lock:
        if stage.frozen or not stage.changed():
            return "skip"
        try:
            if not _is_recorded(stage):
                # without running it `restore` would look up the inputs of the last run
                stage.save_deps()
                for out in stage.outs:
                    out.hash_info = HashInfo()
            repo.stage_cache.restore(stage, dry=True)
        except RunCacheNotFoundError:
            return "run"
        stage.remove_outs(ignore_remove=False, force=False)  # else DVC asks at the terminal whether it may
        repo.stage_cache.restore(stage)
    return "restored"


def _is_recorded(stage: Stage) -> bool:
    """Say whether dvc.lock has this stage with these inputs, so that its outputs alone are missing or changed."""
    return not stage.changed_stage() and stage.deps_cached() and all(out.hash_info for out in stage.outs)


def _ask(root: Path, question: Callable[[Repo], T]) -> T:
    with contextlib.ExitStack() as stack:
        return _explain(root, lambda: question(stack.enter_context(Repo(str(root)))))


def _silence() -> None:
    """Keep DVC's own bars away: it draws them wherever stderr is a terminal and its log is not quiet."""
    for package in ("dvc", "dvc_data"):
        logging.getLogger(package).setLevel(logging.CRITICAL)


def _explain(root: Path, question: Callable[[], T]) -> T:
    try:
        return question()
    except LockError:
        at_work = _name_workers(root / RWLOCK)
        raise EvidenceError(
            f"{root / _STAGES}: expected no other DVC at work on its stages, found one{at_work}; wait for it or end "
            f"it, and remove {root / RWLOCK} where that is no DVC"
        ) from None
    except Exception as error:  # whatever DVC and its parsers raise: what it can't explain is not up to date
        _check_merged(root / _LOCK)
        message = " ".join(str(error).split())
        raise EvidenceError(
            f"{root / _STAGES}: expected stages that DVC can compare with {_LOCK}, got "
            f"{type(error).__name__}: {message}; run `dvc status`"
        ) from error


def _name_workers(path: Path) -> str:
    """Name the processes of DVC's list of readers and writers that run; nothing where it can't be read."""
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
        held = [*lists["write"].values(), *sum(lists["read"].values(), [])]
        named = sorted({f"{one['pid']}: {one['cmd']}" for one in held if _is_running(int(one["pid"]))})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return f" (process {', '.join(named)})" if named else ""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    return True


def _check_merged(lock: Path) -> None:
    """Refuse a dvc.lock that git could not merge."""
    if lock.is_file() and b"\n<<<<<<< " in b"\n" + lock.read_bytes():
        raise EvidenceError(
            f"{lock}: expected one side of a merge, got both; take either whole, as by `git checkout --ours {_LOCK}`, "
            "and run `make repro`"
        )


def _find_stale(repo: Repo, runs_here: Collection[str]) -> dict[str, list[str]]:
    stages, graph = repo.index.stages, repo.index.graph
    entries = {path: _read_lock(Path(path)) for path in {stage.path for stage in stages}}
    outs = [out for stage in stages for out in stage.outs]
    stale: dict[str, list[str]] = {}
    # depth first, as `dvc repro` runs them
    for stage in networkx.dfs_postorder_nodes(graph):
        problems = _find_problems(stage, entries[stage.path], outs, may_differ=_name(stage) in runs_here)
        if problems or any(_name(other) in stale for other in graph.successors(stage)):
            stale[_name(stage)] = problems
    return stale


def _name(stage: Stage) -> str:
    """Name a stage as on the command line of DVC in the project's root: one of a file elsewhere by that file."""
    name = stage.name if isinstance(stage, PipelineStage) else ""
    return name if stage.path_in_repo == _STAGES else ":".join(filter(None, (stage.path_in_repo, name)))


def _read_lock(stages: Path) -> Mapping[str, Entry]:
    """Return the entries of the stages of one dvc.yaml; a .dvc file, which is its own entry, has none."""
    path = stages.with_name(_LOCK)
    content = YAML(typ="safe").load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return dict(content.get("stages") or {})


def _find_problems(
    stage: Stage, entries: Mapping[str, Entry], outs: Sequence[Output], *, may_differ: bool
) -> list[str]:
    """Say what is wrong with a stage, whatever is with those before it."""
    if not isinstance(stage, PipelineStage):
        return [f"{out.def_path} is another file" for out in stage.outs if _compare(out) == "modified"]
    entry = entries.get(stage.name)
    problems = _find_unwatched(stage, may_differ=may_differ)
    if entry is None:
        return [*problems, f"no entry in {_LOCK}"]
    problems += _find_redefined(stage, entry)
    if not may_differ:
        problems += [problem for dep in stage.deps for problem in _find_other_dependency(dep, outs)]
        problems += [problem for out in stage.outs for problem in _find_other_output(out)]
    return problems


def _find_unwatched(stage: Stage, *, may_differ: bool) -> list[str]:
    """Say how dvc.yaml takes a stage from what DVC watches."""
    problems = ["frozen: DVC would never run it"] if stage.frozen else []
    if Path(stage.wdir) != Path(stage.path).parent:
        problems.append(f"wdir: expected the folder of dvc.yaml, got {stage.wdir!r}")
    if not may_differ and (stage.always_changed or not stage.deps):
        problems.append("always changed: nobody can say whether it is what would be made now")
    return problems


def _find_redefined(stage: PipelineStage, entry: Entry) -> Iterator[str]:
    """Yield what dvc.yaml says of a stage and its entry does not, or the other way round."""
    if stage.cmd != entry.get("cmd"):
        yield f"cmd is {stage.cmd!r}, {_LOCK} has {entry.get('cmd')!r}"
    watched = [dep for dep in stage.deps if isinstance(dep, ParamsDependency)]
    lists = {
        "deps": [dep.def_path for dep in stage.deps if dep not in watched],
        "outs": [out.def_path for out in stage.outs],
        "params": [dep.def_path for dep in watched],
    }
    recorded = {part: [item["path"] for item in entry.get(part, [])] for part in ("deps", "outs")}
    recorded["params"] = list(entry.get("params", {}))
    for part, names in lists.items():
        yield from _find_unequal(part, names, recorded[part])
    for dep in watched:
        if dep.params:  # else every key of the file
            yield from _find_unequal(dep.def_path, dep.params, entry.get("params", {}).get(dep.def_path, {}))


def _find_unequal(part: str, asked: Collection[str], recorded: Collection[str]) -> Iterator[str]:
    for names, where in ((set(asked) - set(recorded), _LOCK), (set(recorded) - set(asked), "dvc.yaml")):
        if names:
            yield f"{part}: {', '.join(sorted(names))} not in {where}"


def _find_other_dependency(dep: Output, outs: Sequence[Output]) -> Iterator[str]:
    """Say how a setting or a dependency differs from dvc.lock."""
    change = _compare(dep)
    if isinstance(change, dict):
        yield f"{dep.def_path}: {', '.join(f'{key} {how}' for key, how in change.items())}"
    elif change == "deleted" and not isinstance(dep, ParamsDependency):
        yield from _find_unexplained(dep, outs)
    elif change:
        yield f"{dep.def_path} {change}"


def _find_unexplained(dep: Output, outs: Sequence[Output]) -> Iterator[str]:
    """Say why a dependency that is not here is not what the stages before say that it was."""
    same = [out for out in outs if out.fs_path == dep.fs_path]
    parts = [out for out in outs if Path(dep.fs_path) in Path(out.fs_path).parents]
    if not dep.hash_info:
        yield f"{dep.def_path}: {_LOCK} has no digest of it"
    elif same:
        if same[0].hash_info != dep.hash_info:
            yield f"{dep.def_path} is not what {_LOCK} has of {_name(same[0].stage)}"
    elif not parts:
        yield f"{dep.def_path} is missing, and no stage makes it"
    elif any(not out.hash_info for out in parts) or _count(parts) != _count([dep]):
        yield f"{dep.def_path} is not what {_LOCK} has of {', '.join(_name(out.stage) for out in parts)} together"


def _compare(file: Output) -> Any:
    """Return how a file differs from dvc.lock ("deleted", "modified", "new"), settings by key; None: it does not."""
    return next(iter(file.workspace_status().values()), None)


def _count(outs: Sequence[Output]) -> tuple[int, int]:
    """Return bytes and number of files."""
    return sum(out.meta.size or 0 for out in outs), sum(out.meta.nfiles or 1 for out in outs)


def _find_other_output(out: Output) -> Iterator[str]:
    """Say how an output differs from dvc.lock; one that DVC keeps may be missing."""
    change = _compare(out)
    if not out.hash_info:
        yield f"{out.def_path}: {_LOCK} has no digest of it"
    elif change and not (change == "deleted" and out.use_cache):
        yield f"{out.def_path} {change}"
