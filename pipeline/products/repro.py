"""Run every stage that is out of date under one view: the command `quantgate repro`.

Candidates are made side by side (`prefetch.py`), and DVC notes them in dvc.lock and its cache, all at once: else it
would start a process for each, to take over what is there. Then `dvc repro` judges, and makes what could not be noted.
It runs as a process of its own. What it prints is passed on and not read: which stages are out of date, DVC's API says
ahead, and each stage says itself that it begins. Where none is, DVC is not run. The verdicts come last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from pipeline.errors import EvidenceError
from pipeline.gate.verdicts import REPORT_FILE, VERDICT_FILE, Judgement, blocking_verdicts
from pipeline.gate.wording import use_metrics
from pipeline.products.inputs import WARNED
from pipeline.products.params import get_product, load_params
from pipeline.products.prefetch import ENV_STAGE, STAGES, make_ahead, open_run
from pipeline.records.record_files import read_record
from pipeline.report import PAGE
from pipeline.report.terminal import render_gate
from pipeline.running.prefetched import Work, digest_inputs_now, put_back
from pipeline.running.progress_view import View, end_on_sigterm
from pipeline.running.run_state import Phase
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
        QuantgateError: candidates failed, or stage `env`; nothing is judged then.
    """
    params = load_params()
    products = [get_product(params, name, kind=Product) for name in names or params.products]
    targets = [f"release@{product.name}" for product in products] if names else []
    with open_run(names, num_jobs) as (view, candidates, share):
        due = list_due(targets)
        ahead = [name for name in due if share.num_jobs and name.partition("@")[0] in STAGES]
        phase = view.plan("dvc repro", [name for name in due if name not in ahead], is_serial=True)
        if ahead:
            view.later = phase.predict()
            make_ahead(view, candidates, share)
            _note(ahead, candidates)
        if all(name == ENV_STAGE for name in due):  # `open_run` has run it
            view.say("nothing is out of date")
            code = 0
        else:
            code = _run_dvc(view, phase, targets)
    for line in _conclude(phase, products, has_failed=code != 0):
        print(line, flush=True)
    return code


def _conclude(phase: Phase, products: Sequence[Product], *, has_failed: bool) -> Iterator[str]:
    """Yield how the gates ended: DVC says more behind a verdict, and nothing of one that stands."""
    stopped = ""
    for product in products:
        step, report = phase.steps.get(f"gate@{product.name}"), product.reports / REPORT_FILE
        if step and step.outcome == "failed":
            stopped = f"{product.name}: stopped by its gate{_render_verdict(product) or f', as said above ({report})'}"
        elif step or not has_failed:  # else it was not reached, perhaps
            when, outcomes = "" if step else " before", _read_outcomes(product)
            ships = ", ".join(name if said == "pass" else f"{name} ({said})" for name, said in outcomes.items())
            how = "passed" if set(outcomes.values()) == {"pass"} else "let through by"
            yield f"{product.name}: {how} its gate{when}: {ships} ({report}, {product.build / PAGE})"
    if stopped:  # DVC goes on to no other gate
        yield stopped


def _read_outcomes(product: Product) -> dict[str, str]:
    """Return the verdicts of the candidates that ship: one may be let through without a pass.

    That the gate let them through, DVC has said: where no file tells how, nothing is added.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(EvidenceError):
        judgement = read_record(product.reports / VERDICT_FILE, Judgement)
        found = {verdict.candidate: verdict.outcome for verdict in judgement.verdicts}
    return {name: found.get(name, "pass") for name in product.release}


def _render_verdict(product: Product) -> str:
    """Return the verdict that stopped a product; nothing where the gate found that it does not stand."""
    with contextlib.suppress(EvidenceError), use_metrics(product.metrics):
        judgement = read_record(product.reports / VERDICT_FILE, Judgement)
        if blocking_verdicts(judgement):
            return f"\n\n{render_gate(judgement)}"
    return ""


def _note(names: Sequence[str], candidates: Mapping[str, Product]) -> None:
    """Have DVC note stages whose results were made ahead and lie in place; the others it runs itself.

    Raises:
        EvidenceError: DVC can't; what was made is still kept for its stages.
    """
    works = {}
    for name in names:
        stage, _, candidate = name.partition("@")
        work = Work(stage, candidate, candidates[candidate])
        if put_back(work, digest_inputs_now(work)):
            works[name] = work
    note_runs(works)
    for work in works.values():  # no stage will take it over
        work.seal.unlink()
        shutil.rmtree(work.folder, ignore_errors=True)


def _run_dvc(view: View, phase: Phase, targets: Sequence[str]) -> int:
    """Run `dvc repro` as the second phase."""
    command = [sys.executable, "-m", "dvc", "repro", *targets]
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
