"""`quantgate prefetch` without DVC and without work: what is made in which order, who shares the machine, who fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.errors import EvidenceError, JournalError, SettingsError
from pipeline.products import KINDS, jobs, prefetch, prefetch_step
from pipeline.products.jobs import count_jobs
from pipeline.products.params import Params, load_params
from pipeline.products.prefetch import choose_candidates
from pipeline.products.prefetch_step import Order
from pipeline.products.text.settings import VllmEngine
from pipeline.running.prefetched import read_watched
from pipeline.running.progress_view import View
from pipeline.running.stage_code import digest_code, list_code
from pipeline.settings.base import Product
from pipeline.settings.execution import LocalExecution, RayExecution
from tests.paths import ROOT


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "params.yaml")


class Workshop:
    """Writes down what it is asked for."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.failing = failing
        self.asked: list[str] = []
        self.orders: list[Order] = []

    def run(self, order: Order) -> bool:
        """Fail where it is asked to."""
        self.orders.append(order)
        self.asked.append(f"{order.stage}@{order.candidate}")
        return self.asked[-1] not in self.failing


class Judge:
    """Writes down which product it is given, and what had been made by then."""

    def __init__(self, unfit: tuple[str, ...] = (), *, problem: str = "right in 0 of 200 cases") -> None:
        self.workshop: Any = None
        self.problems = dict.fromkeys(unfit, [problem])  # by reference
        self.unfit: list[str] = []
        self.judged: dict[str, list[str]] = {}
        self.has_ended = False

    def list_steps(self, product: Product) -> list[str]:
        """Name one step of each product but the agent."""
        return [f"compare@{product.name}"] if product.name != "agent" else []

    def find_unfit(self, product: Product) -> list[str]:
        """Find fault with the references that it was told of."""
        problems = self.problems.get(product.reference, [])
        self.unfit += [product.name] if problems else []
        return problems

    def judge(self, product: Product, gpus: str | None) -> None:
        """Judge nothing."""
        assert product.name not in self.judged
        self.judged[product.name] = list(self.workshop.asked)

    def end(self) -> None:
        """Write down that it was told."""
        self.has_ended = True


def make_all(
    params: Params,
    plans: Mapping[str, str],
    *,
    failing: tuple[str, ...] = (),
    num_jobs: int = 1,
    names: Sequence[str] = ("people",),
    judge: Judge | None = None,
) -> tuple[list[str], Workshop]:
    """Make the candidates of products; return those that failed, and the workshop."""

    def ask(name: str) -> Any:
        if plans.get(name) == "error":
            raise EvidenceError("DVC can't say")
        return plans.get(name, "skip")

    workshop: Any = Workshop(failing)
    share = prefetch.Share(params, defaultdict(dict), num_jobs, ())
    view = View(Path("progress.jsonl"))
    if judge:
        judge.workshop = workshop
    failed = prefetch._make_all(ask, workshop, choose_candidates(params, names), share, view, judge)
    [phase] = view._phases
    unjudged = {f"compare@{name}" for name in judge.judged} if judge else set()  # this one begins none
    assert unjudged.issuperset(phase.waiting), "what needs no work is not waited for"
    return failed, workshop


def test_products_and_candidates_are_chosen_by_name(params: Params) -> None:
    assert list(choose_candidates(params, [])) == [n for p in params.products.values() for n in p.candidates]
    assert list(choose_candidates(params, ["tiled", "people"])) == [*params.products["people"].candidates, "tiled"]
    with pytest.raises(SettingsError, match="expected products .*agent.* or candidates, got other, wrong"):
        choose_candidates(params, ["people", "other", "wrong"])


def test_what_dvc_would_run_is_made_and_nothing_else(params: Params) -> None:
    """What its cache has is not made; evaluated it is, where that is out of date."""
    plans = {
        "optimize@people": "run",
        "evaluate@people": "run",
        "evaluate@people-again": "run",
        "optimize@int8": "run",
        "optimize@compiled": "restored",
        "evaluate@compiled": "run",
        "evaluate@bf16-channels-last": "restored",
    }
    failed, workshop = make_all(params, plans)
    assert not failed
    made = ["optimize@people", "evaluate@people", "evaluate@people-again", "optimize@int8", "evaluate@compiled"]
    assert workshop.asked == made


def test_those_that_servers_answer_for_come_last_and_else_the_order_is_that_of_the_settings(params: Params) -> None:
    """Servers take no turns: on a few cores detectors were timed beside them."""
    names = ["agent", "w8a8", "shots", "people", "int8", "upscaler"]
    _, workshop = make_all(params, {f"evaluate@{name}": "run" for name in names}, names=list(params.products))
    order = [name.partition("@")[2] for name in workshop.asked]
    assert order == ["shots", "people", "int8", "upscaler", "agent", "w8a8"]


def test_one_that_fails_is_named_and_stops_no_other(params: Params) -> None:
    plans = {f"{stage}@{name}": "run" for stage in ("optimize", "evaluate") for name in ("people", "int8", "compiled")}
    plans["evaluate@compiled"] = "error"
    failed, workshop = make_all(params, plans, failing=("optimize@people",))
    assert failed == ["people", "compiled"]
    assert workshop.asked == ["optimize@people", "optimize@int8", "evaluate@int8", "optimize@compiled"]


def test_a_product_is_judged_as_soon_as_its_last_candidate_is_made_and_never_without_one(params: Params) -> None:
    names = ["shots", "shots-again", "people", "int8", "upscaler", "tiled"]
    plans = {f"evaluate@{name}": "run" for name in names} | {"optimize@tiled": "run", "evaluate@tiled": "error"}
    judge = Judge()
    failed, workshop = make_all(
        params, plans, failing=("evaluate@int8",), names=["shots", "people", "upscaler"], judge=judge
    )
    assert failed == ["int8", "tiled"] and len(workshop.asked) == len(names)
    assert judge.judged == {"shots": ["evaluate@shots", "evaluate@shots-again"]}


@pytest.mark.parametrize("unfit", ["people", "int8"])
def test_no_candidate_is_begun_beside_a_reference_that_is_unfit(
    params: Params, unfit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reference that was right in none of 200 cases was found after hours of work on the others."""
    names = ["people", "int8", "compiled", "upscaler"]
    judge = Judge((unfit,))
    failed, workshop = make_all(params, {f"evaluate@{name}": "run" for name in names}, names=names, judge=judge)
    is_stopped = unfit == "people"  # the others are nobody's reference
    begun = ["people", "upscaler"] if is_stopped else names
    assert workshop.asked == [f"evaluate@{name}" for name in begun]
    assert failed == [], "the gate of the others goes on"
    assert list(judge.judged) == (["upscaler"] if is_stopped else ["people", "upscaler"])
    said = capsys.readouterr().err
    assert ("people: no other candidate is begun, as the reference is unfit: right in 0 of" in said) == is_stopped


@pytest.mark.parametrize("num_jobs", [1, 3])
def test_none_is_begun_beside_an_unfit_reference_that_was_made_before(
    params: Params, num_jobs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that `dvc repro` had evaluated and refused cost hours of work on each candidate that was added."""
    judge = Judge(("people",), problem="objects\x1b[2J: right in 0\nof 200 cases")
    plans = {f"evaluate@{name}": "run" for name in ("int8", "compiled", "upscaler")}
    failed, workshop = make_all(params, plans, names=["people", "upscaler"], judge=judge, num_jobs=num_jobs)
    assert workshop.asked == ["evaluate@upscaler"]
    assert failed == [] and list(judge.judged) == ["upscaler"]
    assert "as the reference is unfit: objects\\x1b[2J: right in 0" in capsys.readouterr().err


def test_one_whose_candidates_are_as_they_were_is_left_to_dvc(params: Params) -> None:
    judge = Judge()
    make_all(params, {"evaluate@people": "run"}, names=["people", "upscaler"], judge=judge)
    assert list(judge.judged) == ["people"]


@pytest.mark.parametrize("num_jobs", [2, 8])
def test_of_candidates_that_end_at_once_one_has_the_product_judged(params: Params, num_jobs: int) -> None:
    judge = Judge()
    plans = {f"evaluate@{name}": "run" for name in params.products["shots"].candidates}
    make_all(params, plans, names=["shots"], num_jobs=num_jobs, judge=judge)
    assert len(judge.judged["shots"]) == len(plans)


def test_what_goes_wrong_in_one_thread_lets_the_others_end(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that was not given back made the run wait for ever."""

    def run(workshop: Workshop, order: Order) -> bool:
        raise OSError("no memory")

    monkeypatch.setattr(Workshop, "run", run)
    with pytest.raises(OSError, match="no memory"):
        make_all(params, {f"evaluate@{name}": "run" for name in ("people", "int8", "compiled")})


def test_ctrl_c_ends_a_judge_at_work(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads are waited for, and so was DVC."""

    def run(workshop: Workshop, order: Order) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Workshop, "run", run)
    judge = Judge()
    with pytest.raises(KeyboardInterrupt):
        make_all(params, {"evaluate@people": "run"}, judge=judge)
    assert judge.has_ended


def test_as_many_as_asked_work_at_once_and_share_the_machine(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {f"evaluate@{name}": "run" for name in ("people", "int8", "compiled")}
    barrier = threading.Barrier(3)
    monkeypatch.setattr(Workshop, "run", lambda self, order: bool(self.orders.append(order) or barrier.wait(60) + 1))
    failed, workshop = make_all(params, plans, num_jobs=8)
    assert not failed and len(workshop.orders) == 3
    assert {order.num_workers for order in workshop.orders} == {max(1, params.products["people"].num_workers // 3)}


@pytest.mark.parametrize(
    ("gpus", "num_jobs", "shares"),
    [
        ((), 2, [None, None]),
        (("0", "1", "2", "3"), 2, ["0,2", "1,3"]),
        (("0", "1"), 3, ["0", "1", "0"]),
        (("GPU-ab",), 2, ["GPU-ab", "GPU-ab"]),
    ],
)
def test_each_candidate_has_its_gpus(
    params: Params, gpus: tuple[str, ...], num_jobs: int, shares: list[str | None]
) -> None:
    share = prefetch.Share(params, defaultdict(dict), num_jobs, gpus)
    people = params.products["people"]
    assert [share.give("people", people, place).gpus for place in range(num_jobs)] == shares


def take_gpus(product: Product, num_gpus: int, **sizes: Any) -> Product:
    """Have vLLM serve the reference of the agent, each model on so many GPUs."""
    sizes = sizes or {"tensor_parallel_size": num_gpus}
    engine = VllmEngine(kind="vllm", command=["vllm", "serve"], version="0.26.0", **sizes)
    reference = product.candidates["agent"].model_copy(update={"engine": engine})
    return product.model_copy(update={"candidates": product.candidates | {"agent": reference}})


@pytest.mark.parametrize(
    ("num_gpus", "needed", "num_jobs"),
    [
        (4, 4, 0),
        (8, 4, 2),
        (8, 3, 2),
        (8, 1, 8),
        (1, 1, 0),  # vLLM takes a card whole, however small the model
    ],
)
def test_a_candidate_that_takes_gpus_whole_has_them(
    params: Params, monkeypatch: pytest.MonkeyPatch, num_gpus: int, needed: int, num_jobs: int
) -> None:
    """A model that vLLM splits among four cards was given one of them; small ones were several on a card."""
    gpus = tuple(map(str, range(num_gpus)))
    found = {"list_own_gpus": gpus, "read_gpu_free_mib": (140_000,) * num_gpus, "count_cores": 64}
    found |= {"read_available_mib": 2_000 << 10, "_measure_mib": 6}
    for name, value in found.items():
        monkeypatch.setattr(jobs, name, lambda *_, value=value: value)
    product = take_gpus(params.products["agent"].use_workers(num_gpus), needed)
    assert count_jobs(params, [product]) == num_jobs
    named = replace(params, execution=LocalExecution(num_workers=num_gpus))
    assert count_jobs(named, [product]) == num_jobs
    for asked in {num_jobs or 1, 8}:  # whoever asks for more shares cards
        share = prefetch.Share(params, defaultdict(dict), asked, gpus)
        given = [(share.give("agent", product, place).gpus or "").split(",") for place in range(asked)]
        assert all(len(set(own)) >= needed for own in given)


@pytest.mark.parametrize(
    ("sizes", "num_gpus"),
    [({"data_parallel_size": 2}, 2), ({"tensor_parallel_size": 2, "options": {"pipeline-parallel-size": 2}}, 4)],
)
def test_all_gpus_of_an_engine_count(params: Params, sizes: dict[str, Any], num_gpus: int) -> None:
    product = take_gpus(params.products["agent"], num_gpus, **sizes)
    assert product.count_whole_gpus("agent") == num_gpus
    assert params.products["agent"].count_whole_gpus("agent") == 0


@pytest.mark.parametrize(("host_gib", "mib", "num_jobs"), [(192, 16_000, 2), (2_000, 16_000, 8), (64, 16_000, 0)])
def test_on_several_gpus_as_many_candidates_work_at_once_as_fit_into_memory(
    params: Params, monkeypatch: pytest.MonkeyPatch, host_gib: int, mib: int, num_jobs: int
) -> None:
    """They are quantised in the memory of the host, one for each of eight GPUs."""
    gpus = tuple(map(str, range(8)))
    found = {"list_own_gpus": gpus, "read_gpu_free_mib": (80_000,) * 8, "count_cores": 64}
    found |= {"read_available_mib": host_gib << 10, "_measure_mib": mib}
    for name, value in found.items():
        monkeypatch.setattr(jobs, name, lambda *_, value=value: value)
    products = [params.products["agent"].use_workers(8)]
    assert count_jobs(params, products) == num_jobs
    assert count_jobs(replace(params, execution=LocalExecution(num_workers=8)), products) == 8


def test_workers_are_divided_and_one_is_left_to_each(params: Params) -> None:
    product = params.products["agent"].use_workers(5)
    numbers = [
        prefetch.Share(params, defaultdict(dict), num, ()).give("agent", product, 0).num_workers for num in (1, 2, 3, 8)
    ]
    assert numbers == [5, 2, 1, 1]


@pytest.mark.parametrize(
    ("gpus", "execution", "workers", "num_jobs"),
    [
        ((), LocalExecution(), [4, 3], 3),
        ((), LocalExecution(), [1, 3], 1),  # imports are saved all the same
        (("0",), LocalExecution(), [1], 0),
        (("0", "1"), LocalExecution(), [2, 2], 2),
        ((), RayExecution(kind="ray"), [4], 0),
    ],
)
def test_it_takes_as_many_jobs_as_help(
    params: Params,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    execution: LocalExecution | RayExecution,
    workers: list[int],
    num_jobs: int,
) -> None:
    monkeypatch.setattr(jobs, "list_own_gpus", lambda: gpus)
    monkeypatch.setattr(jobs, "read_available_mib", lambda _: 16 << 10)
    products = [params.products["agent"].use_workers(number) for number in workers]
    assert count_jobs(replace(params, execution=execution), products) == num_jobs


@pytest.mark.parametrize(
    ("free_mib", "host_gib", "cores", "mib", "num_jobs"),
    [
        ((80_000,), 128, 16, 6, 16),  # a core each: the eleven candidates of the agent kept six of sixteen busy
        ((80_000,), 128, 64, 6, 19),
        ((80_000,), 24, 64, 6, 5),  # the host is full
        ((80_000,), 256, 64, 2_500, 3),
        ((80_000,), 256, 64, 16_000, 0),  # one that may fill the card
        ((24_000, 4_000), 128, 16, 6, 5),  # another process holds the second card
        ((), 128, 16, 6, 0),  # a driver that doesn't say
        ((80_000,), 128, 1, 6, 0),
    ],
)
def test_small_models_share_a_gpu_as_far_as_memory_and_cores_allow_it(
    params: Params,
    monkeypatch: pytest.MonkeyPatch,
    free_mib: tuple[int, ...],
    host_gib: int,
    cores: int,
    mib: int,
    num_jobs: int,
) -> None:
    """One after another, candidates that leave a GPU idle took three times as long."""
    found = {"list_own_gpus": ("0",), "read_gpu_free_mib": free_mib, "count_cores": cores}
    found |= {"read_available_mib": host_gib << 10}
    for name, value in found.items():
        monkeypatch.setattr(jobs, name, lambda *_, value=value: value)
    monkeypatch.setattr(jobs, "_measure_mib", lambda _: mib)
    monkeypatch.setattr(jobs, "locate_checkpoint", lambda folder, _: Path(folder))
    products = [params.products["agent"].use_workers(1)]
    assert count_jobs(params, products) == num_jobs
    one = replace(params, execution=LocalExecution(num_workers=1))
    assert count_jobs(one, products) == 0, "whoever names a number means it"


@pytest.mark.parametrize(
    ("host_gib", "mib", "num_jobs"), [(8, 6, 7), (64, 6, 62), (64, 16_000, 1), (256, 16_000, 4), (1, 6, 1)]
)
def test_without_a_gpu_as_many_candidates_work_at_once_as_fit_into_memory(
    params: Params, monkeypatch: pytest.MonkeyPatch, host_gib: int, mib: int, num_jobs: int
) -> None:
    """On 64 cores and 64 GiB all candidates of a model of 16 GB were quantised at once, and killed."""
    for name, value in {"list_own_gpus": (), "read_available_mib": host_gib << 10, "_measure_mib": mib}.items():
        monkeypatch.setattr(jobs, name, lambda *_, value=value: value)
    products = [params.products["agent"].use_workers(64)]
    assert count_jobs(params, products) == num_jobs
    named = replace(params, execution=LocalExecution(num_workers=64))
    assert count_jobs(named, products) == 64, "whoever names a number means it"


@pytest.mark.parametrize("given", ["0", "-2", "four", "1.5", ""])
def test_a_number_that_is_none_is_one_line(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefetch", f"--jobs={given}"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("quantgate: --jobs: expected auto, or how many candidates at once, such as 4, got ")


@pytest.mark.parametrize(
    ("code", "said", "failed"),
    [
        (0, "optimize: done", False),
        (1, "optimize: failed", True),
        (130, "optimize: interrupted; what finished is kept", False),
        (-15, "optimize: interrupted; what finished is kept", False),
        (-9, "optimize: its process was ended by signal 9", True),
    ],
)
def test_how_a_step_ended_is_said(
    params: Params, capsys: pytest.CaptureFixture[str], tmp_path: Path, code: int, said: str, failed: bool
) -> None:
    """Ctrl-C was said to be a failure, of which nothing was said above."""

    class Process:
        is_gone = False

        def run(self, label: str, function: Any, order: Order) -> int:
            return code

    order = prefetch.Share(params, defaultdict(dict), 1, ()).give("people", params.products["people"], 0)
    with View(tmp_path / "facts") as view, view.open_phase(view.plan("candidates", ["optimize@people"])):
        workshop = prefetch._Workshop(view)
        workshop._processes["vision"] = Process()  # type: ignore[assignment]
        assert workshop.run(replace(order, stage="optimize")) == (code == 0)
    shown = capsys.readouterr().err
    assert f"people: {said}" in shown and ("failed: optimize@people" in shown) == failed


@pytest.mark.parametrize("command", ["prefetch", "repro"])
def test_where_no_project_is_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("quantgate: params.yaml: ")
    assert not list(tmp_path.iterdir())


def test_a_second_prefetch_is_refused(params: Params, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prefetch, "load_params", lambda: params)
    with prefetch.lock_project(), pytest.raises(JournalError, match="expected one prefetch at a time"):
        prefetch.prefetch([], 1)


def test_nothing_is_made_where_the_environment_is_refused(
    params: Params, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prefetch, "load_params", lambda: params)
    monkeypatch.setattr(prefetch, "read_own_commands", lambda *_: ["exit 1"])
    with pytest.raises(Exception, match="^stage env: failed, as said above; nothing was made$"):
        prefetch.prefetch([], 1)


@pytest.mark.parametrize("command", ["prefetch", "repro"])
def test_a_mistake_in_the_settings_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    """`prefetch` said after it that stage env had failed, as if there were another fault."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("  agent-again:", "  agent-again: {steps: []}\n  agent-again:", 1))
    monkeypatch.setattr(prefetch, "read_own_commands", lambda *_: ["echo stage env ran >&2; exit 1"])
    assert main([command]) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("quantgate: params.yaml: not valid YAML: line ") and 'duplicate key "agent-again"' in line


def test_what_a_run_took_counts_stage_env(params: Params, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a cold machine it is half a minute, of which nothing was to be seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prefetch, "read_own_commands", lambda *_: ["sleep 0.3"])
    monkeypatch.setattr(prefetch, "load_params", lambda: params)
    monkeypatch.setattr(prefetch, "read_watched", lambda *_: {})
    with prefetch.open_run([], 1) as (view, *_):
        assert time.monotonic() - view._start > 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_imported_ahead_is_no_code_of_a_stage(kind: str) -> None:
    """Else an edit of one stage's code would make the other one stale, too."""
    optimize, evaluate = (set(list_code(stage, kind, ROOT)) for stage in ("optimize", "evaluate"))
    assert evaluate - optimize and optimize - evaluate
    assert not any("prefetch.py" in path or "preload" in path for path in optimize | evaluate)


PRELOAD = """
import os, sys
from pathlib import Path
from pipeline.products import KINDS
from pipeline.products.params import load_params
product = next(p for p in load_params().products.values() if p.kind == sys.argv[1])
for stage in ("optimize", "evaluate"):
    KINDS[product.kind].preload(stage, product, Path())
threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
import torch
print(torch.cuda.is_initialized(), len(threads))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_imports_leave_a_process_that_can_be_copied(kind: str) -> None:
    """A thread of torch that a copy lacks would be waited for forever. OpenBLAS mends its own, and has none here."""
    numbers = {"OMP_NUM_THREADS": "8", "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", PRELOAD, kind],
        cwd=ROOT,
        env=os.environ | numbers,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    is_initialized, num_threads = child.stdout.splitlines()[-1].split()
    assert is_initialized == "False"
    assert int(num_threads) <= 2  # itself, and one of jemalloc, which mends its own as well


def edit_settings() -> None:
    write_inputs("2", CODE)


def edit_code() -> None:
    write_inputs("1", "of another day")


CODE = digest_code("optimize", "vision")


def write_inputs(steps: str, code: str) -> None:
    path = Path("build/env/inputs.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"optimize": {"people": {"steps": steps, "code": code}}}))


@pytest.mark.parametrize("edit", [edit_settings, edit_code])
@pytest.mark.parametrize("is_early", [True, False])
def test_what_was_edited_since_it_began_is_not_kept(
    params: Params, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, edit: Callable[[], None], is_early: bool
) -> None:
    """Stage env, run in another terminal, knows the edit; the process has the settings and the code of before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prefetch_step, "work_here", lambda _: None)
    write_inputs("1", CODE)
    people = params.products["people"]
    edits = [edit]

    def make(_: Order) -> None:
        target = people.build / "candidates/people"
        target.mkdir(parents=True, exist_ok=True)
        (target / "candidate.json").write_text("{}")
        while edits:
            edits.pop()()

    monkeypatch.setattr(prefetch_step, "_run_stage", make)
    watched = {"people": {"optimize": read_watched("optimize", "people")}}
    order = replace(prefetch.Share(params, watched, 1, ()).give("people", people, 0), stage="optimize")
    if is_early:
        edits.pop()()
    with pytest.raises(EvidenceError, match="were edited meanwhile; run prefetch again"):
        prefetch_step.carry_out(order)
    seal = people.build / "prefetched/optimize/people.json"
    assert not seal.exists()
    write_inputs("1", CODE)
    prefetch_step.carry_out(order)
    assert seal.is_file()


@pytest.mark.parametrize("content", ["", '{"a": ', "{}"])
def test_half_a_lock_that_a_kill_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """DVC writes it in place, and refused all work after a kill in between."""
    monkeypatch.chdir(tmp_path)
    path = Path(".dvc/tmp/rwlock")
    prefetch._remove_half_a_lock()  # none is there
    path.parent.mkdir(parents=True)
    path.write_text(content)
    prefetch._remove_half_a_lock()
    assert path.exists() == (content == "{}") and bool(capsys.readouterr().err) == (content != "{}")


@pytest.mark.parametrize("stages", ["2", "all", None, 0, True])
def test_a_number_of_stages_that_is_none_is_left_to_vllm_to_refuse(params: Params, stages: Any) -> None:
    """The checks before work count it as one stage; here it was a traceback, or 2222 GPUs."""
    agent = take_gpus(params.products["agent"], 4, tensor_parallel_size=4, options={"pipeline-parallel-size": stages})
    assert agent.count_whole_gpus("agent") == 4
