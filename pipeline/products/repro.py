"""Run every stage that is out of date under one view: the command `quantgate repro`.

Candidates are made side by side (`prefetch.py`), and DVC notes them in dvc.lock and its cache, those of a product at
once: else it would start a process for each, to take over what is there. Products are judged as soon as theirs are made
(`judging.py`). Then `dvc repro` judges the others, and makes what could not be noted. It runs as a process of its own.
What it prints is passed on and not read: which stages are out of date, DVC's API says ahead, and each stage says itself
that it begins. Where none is, DVC is not run. The verdicts come last.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from pipeline.errors import EvidenceError, QuantgateError
from pipeline.gate.verdicts import REPORT_FILE, VERDICT_FILE, Judgement, blocking_verdicts
from pipeline.gate.wording import use_metrics
from pipeline.products.judging import DVC_ENVIRONMENT, DVC_REPRO, EarlyJudge, describe_pass, note_made
from pipeline.products.params import get_product, load_params
from pipeline.products.prefetch import ENV_STAGE, STAGES, Share, make_ahead, open_run
from pipeline.records.record_files import read_record
from pipeline.report.terminal import render_gate
from pipeline.running.progress_view import View, end_on_sigterm
from pipeline.running.run_state import Phase, Step
from pipeline.running.staleness import list_due
from pipeline.settings.base import Product


def repro(names: Sequence[str], num_jobs: int | None) -> int:
    """Run what is out of date; return the exit code of `dvc repro`, which has the last word: 0 if each ended so.

    Products with an unfit reference are left out, and the code is 1 then where DVC's is 0.

    Args:
        names: of products; none: all.
        num_jobs: candidates at once; None: as `count_jobs` says.

    Raises:
        SettingsError: params.yaml is wrong, or a name is not in it.
        JournalError: another run works here.
        QuantgateError: candidates failed, or stage `env`; nothing more is judged then.
    """
    params = load_params()
    products = [get_product(params, name, kind=Product) for name in names or params.products]
    targets = [f"release@{product.name}" for product in products] if names else []
    with open_run(names, num_jobs) as (view, candidates, share):
        due = list_due(targets)
        judge = EarlyJudge(view, due)
        ahead = [name for name in due if share.num_jobs and name.partition("@")[0] in STAGES]
        rest = [name for name in due if name not in ahead]
        if ahead:
            early = {step for product in candidates.values() for step in judge.list_steps(product)}
            view.later = _plan(view, [name for name in rest if name not in early]).predict()
            _make_and_judge(view, candidates, share, judge, products, due)
            note_made([name for name in ahead if name not in judge.noted], candidates)
        fit = [product for product in products if product.name not in judge.unfit]
        if judge.unfit:  # DVC would make their other candidates
            targets = [f"release@{product.name}" for product in fit]
            rest = [name for name in rest if name.partition("@")[2] not in judge.unfit]
        code, steps = int(bool(judge.unfit)), dict[str, Step]()
        if all(name == ENV_STAGE for name in due):  # `open_run` has run it
            view.say("nothing is out of date")
        elif fit:
            dvc_code, steps = _judge_rest(view, rest, fit, targets, judge)
            code = dvc_code or code
    for line in _conclude(steps, products, judge, due, has_failed=code != 0):
        print(line, flush=True)
    return code


def _make_and_judge(
    view: View,
    candidates: Mapping[str, Product],
    share: Share,
    judge: EarlyJudge,
    products: Sequence[Product],
    due: Sequence[str],
) -> None:
    """Make the candidates, and judge products; where some failed, say last how those ended that were judged."""
    try:
        with end_on_sigterm(view, judge.end):
            make_ahead(view, candidates, share, judge)
    except QuantgateError:
        for line in _conclude({}, products, judge, due, has_failed=True):
            view.say(line)
        raise


def _judge_rest(
    view: View, rest: Sequence[str], products: Sequence[Product], targets: Sequence[str], judge: EarlyJudge
) -> tuple[int, dict[str, Step]]:
    """Run `dvc repro`, which ends at the first stage that fails: where one has already, the other products come first.

    Returns:
        Its exit code, and the steps that ran.
    """
    others = [f"release@{product.name}" for product in products if product.name not in judge.failed]
    code, steps = 0, dict[str, Step]()
    for wanted in [others, targets] if judge.failed and others else [targets]:
        left = [name for name in rest if name not in steps and name not in judge.steps]
        if wanted is others:
            left = [name for name in left if name.partition("@")[2] not in judge.failed]
        phase = _plan(view, left)
        code = _run_dvc(view, phase, wanted) or code
        steps |= phase.steps
    return code, steps


def _plan(view: View, names: Sequence[str]) -> Phase:
    return view.plan("dvc repro", names, is_serial=True)


def _conclude(
    steps: Mapping[str, Step],
    products: Sequence[Product],
    judge: EarlyJudge,
    due: Sequence[str],
    *,
    has_failed: bool,
) -> Iterator[str]:
    """Yield how the gates ended: DVC says more behind a verdict, and nothing of one that stands.

    Args:
        steps: of the last `dvc repro`, which may have judged again what was judged early.
        products: of the run.
        judge: that judged early.
        due: stages that were out of date.
        has_failed: the run does not end well.
    """
    stopped = []
    again = {step.owner for step in steps.values()}
    for product in products:
        name, gate, report = product.name, f"gate@{product.name}", product.reports / REPORT_FILE
        step = steps.get(gate) if name in again else judge.steps.get(gate)
        if name in judge.unfit:
            stopped.append(f"{name}: stopped before its other candidates, as its reference is unfit, as said above")
        elif step and step.outcome == "failed":
            said = _render_verdict(product) or f", as said above ({report})"
            stopped.append(f"{name}: stopped by its gate{said}")
        elif step or not has_failed or gate not in due:
            yield describe_pass(product, "" if step else " before")
        elif name in judge.failed and name not in again:
            stopped.append(f"{name}: stopped, as said above ({report})")
        else:
            yield f"{name}: the run ended before its gate; `python -m pipeline repro {name}` goes on with it alone"
    yield from stopped


def _render_verdict(product: Product) -> str:
    """Return the verdict that stopped a product; nothing where the gate found that it does not stand."""
    with contextlib.suppress(EvidenceError), use_metrics(product.metrics):
        judgement = read_record(product.reports / VERDICT_FILE, Judgement)
        if blocking_verdicts(judgement):
            return f"\n\n{render_gate(judgement)}"
    return ""


def _run_dvc(view: View, phase: Phase, targets: Sequence[str]) -> int:
    """Run `dvc repro` as a phase."""
    command = [*DVC_REPRO, *targets]
    with view.open_phase(phase, is_last=True), _start(command, view) as child, end_on_sigterm(view, child.terminate):
        for line in child.stdout or ():
            view.show(line.rstrip("\n"))
        code = child.wait()
        view.close_phase("failed" if code else "done")
    return code


@contextlib.contextmanager
def _start(command: Sequence[str], view: View) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose lines appear above the bars; where there are none, it prints by itself.

    Ctrl-C reaches it as well, and it says how it ends.
    """
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if view.has_bars else {}
    environment = os.environ | DVC_ENVIRONMENT
    with subprocess.Popen(command, env=environment, text=True, errors="replace", **output) as child:  # type: ignore[call-overload]
        try:
            yield child
        except KeyboardInterrupt:
            for line in child.stdout or ():
                view.show(line.rstrip("\n"))
            child.wait()
            raise
