"""Run every stage that is out of date under one view: the command `quantgate repro`.

Candidates are made side by side (`prefetch.py`), and DVC notes them in dvc.lock and its cache, those of a product at
once: else it would start a process for each, to take over what is there. Products are judged as soon as theirs are made
(`judging.py`). Then DVC judges the others, and makes what could not be noted. It runs as a process of its own, and is
told each stage: which are out of date, its API said ahead. What it prints is passed on and not read, as each stage says
itself that it begins. Where none is out of date, DVC is not run. The verdicts come last.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from pipeline.errors import EvidenceError
from pipeline.gate.verdicts import REPORT_FILE, VERDICT_FILE, Judgement, blocking_verdicts
from pipeline.gate.wording import use_metrics
from pipeline.products.inputs import WARNED
from pipeline.products.judging import DVC_REPRO, EarlyJudge, describe_pass, note_made
from pipeline.products.params import get_product, load_params
from pipeline.products.prefetch import ENV_STAGE, STAGES, make_ahead, open_run
from pipeline.records.record_files import read_record
from pipeline.report.terminal import render_gate
from pipeline.running.progress_view import View, end_on_sigterm
from pipeline.running.run_state import Phase, Step
from pipeline.running.staleness import list_due, note_runs
from pipeline.settings.base import Product


def repro(names: Sequence[str], num_jobs: int | None) -> int:
    """Run what is out of date; return the exit code of `dvc repro`.

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
        due = [name for name in list_due(targets) if name != ENV_STAGE]  # `open_run` has run it
        judge = EarlyJudge(view, due)
        if ahead := [name for name in due if share.num_jobs and name.partition("@")[0] in STAGES]:
            early = {step for product in candidates.values() for step in judge.list_steps(product)}
            view.later = _plan(view, [name for name in due if name not in ahead and name not in early]).predict()
            with end_on_sigterm(view, judge.end):
                make_ahead(view, candidates, share, judge)
            judge.settled += note_made(ahead, candidates)
        rest = [name for name in due if name not in judge.settled]
        phase = _plan(view, rest)
        code = _run_dvc(view, phase, rest) if rest else 0
        if due:
            note_runs([ENV_STAGE])
        else:
            view.say("nothing is out of date")
    code = code or max(judge.codes.values(), default=0)
    for line in _conclude(judge.steps | phase.steps, products, has_failed=code != 0):
        print(line, flush=True)
    return code


def _plan(view: View, names: Sequence[str]) -> Phase:
    return view.plan("dvc repro", names, is_serial=True)


def _conclude(steps: Mapping[str, Step], products: Sequence[Product], *, has_failed: bool) -> Iterator[str]:
    """Yield how the gates ended: DVC says more behind a verdict, and nothing of one that stands."""
    stopped = []
    for product in products:
        step, report = steps.get(f"gate@{product.name}"), product.reports / REPORT_FILE
        if step and step.outcome == "failed":
            said = _render_verdict(product) or f", as said above ({report})"
            stopped.append(f"{product.name}: stopped by its gate{said}")
        elif step or not has_failed:  # else it was not reached, perhaps
            yield describe_pass(product, "" if step else " before")
    yield from stopped


def _render_verdict(product: Product) -> str:
    """Return the verdict that stopped a product; nothing where the gate found that it does not stand."""
    with contextlib.suppress(EvidenceError), use_metrics(product.metrics):
        judgement = read_record(product.reports / VERDICT_FILE, Judgement)
        if blocking_verdicts(judgement):
            return f"\n\n{render_gate(judgement)}"
    return ""


def _run_dvc(view: View, phase: Phase, names: Sequence[str]) -> int:
    """Have DVC run stages, in this order, as the second phase."""
    command = [*DVC_REPRO, *names]
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
    environment = os.environ | {"PYTHONUNBUFFERED": "1", WARNED: "1"}
    with subprocess.Popen(command, env=environment, text=True, errors="replace", **output) as child:  # type: ignore[call-overload]
        try:
            yield child
        except KeyboardInterrupt:
            for line in child.stdout or ():
                view.show(line.rstrip("\n"))
            child.wait()
            raise
