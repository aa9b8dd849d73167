"""Judge a product as soon as its candidates are made, while those of other products are still worked on.

DVC notes what was made, and runs the product's own stages that are out of date. Products whose kind has servers wait
for all others: their speed is measured with the machine to itself, and servers take no turns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from pipeline.errors import EvidenceError
from pipeline.gate.verdicts import REPORT_FILE, VERDICT_FILE, Judgement
from pipeline.products import KINDS
from pipeline.products.inputs import WARNED
from pipeline.products.prefetch import STAGES, TURNS
from pipeline.records.plain_text import format_line
from pipeline.records.record_files import read_record
from pipeline.report import PAGE
from pipeline.running.environment import VISIBLE
from pipeline.running.prefetched import Work, digest_inputs_now, put_back
from pipeline.running.progress_view import View
from pipeline.running.run_state import Step
from pipeline.running.staleness import note_runs
from pipeline.running.turns import keep_nobody_waiting, share_machine
from pipeline.settings.base import Product

DVC_REPRO = (sys.executable, "-m", "dvc", "repro", "--single-item")  # the stages that are named, in their order


class EarlyJudge:
    """Judges products of one run; several threads may have it judge, each another product.

    Attributes:
        settled: stages that need no other DVC: what was made ahead is noted, products are judged.
        codes: DVC's exit code for each product that was judged; any but 0: a stage failed, the gate in most cases.
        steps: that these products took, by name.
    """

    def __init__(self, view: View, due: Sequence[str]) -> None:
        """Prepare it.

        Args:
            view: of the run.
            due: the stages that are out of date, in DVC's order.
        """
        self._view, self._due = view, due
        self._children: set[subprocess.Popen[str]] = set()
        self._noting = threading.Lock()
        self.settled: list[str] = []
        self.codes: dict[str, int] = {}
        self.steps: dict[str, Step] = {}

    def list_steps(self, product: Product) -> list[str]:
        """Return the stages of a product itself that are out of date; none where it has to wait for all others.

        Nor where no candidate of it is made in this run.
        """
        if KINDS[product.kind].has_servers or not self._list_made(product):
            return []
        own = (name.partition("@") for name in self._due)
        return [f"{stage}@{name}" for stage, _, name in own if name == product.name and stage not in STAGES]

    def judge(self, product: Product, gpus: str | None) -> None:
        """Have DVC judge a product whose candidates are made; what it can't note of these is left to a later one.

        Args:
            product: all of whose candidates are made.
            gpus: that its stages may use, as CUDA_VISIBLE_DEVICES names them; None: all of this process.
        """
        steps = self.list_steps(product)
        if not steps or not self._note(product):
            self._view.finish(product.name)
            return
        # minutes, perhaps: whoever wants the machine alone waits, and has all others go on
        with share_machine(TURNS), keep_nobody_waiting():
            code = self._run(steps, product.name, {} if gpus is None else {VISIBLE: gpus})
        self.settled += steps
        self.codes[product.name] = code
        self.steps |= self._view.finish(product.name, "failed" if code else "done")
        stopped = f"{product.name}: stopped, as said above ({product.reports / REPORT_FILE}); the others go on"
        self._view.say(stopped if code else describe_pass(product))

    def end(self) -> None:
        """End what DVC has at work."""
        for child in list(self._children):
            child.terminate()

    def _list_made(self, product: Product) -> list[str]:
        wanted = {f"{stage}@{name}" for stage in STAGES for name in product.candidates}
        return [name for name in self._due if name in wanted]

    def _note(self, product: Product) -> bool:
        """Have DVC note the candidates; say whether it has noted every evaluation that was out of date."""
        made = self._list_made(product)
        try:
            with self._noting:
                self.settled += note_made(made, dict.fromkeys(product.candidates, product))
        except EvidenceError as error:
            self._view.say(f"{product.name}: {format_line(str(error))}")
            return False
        return all(name in self.settled for name in made if not name.startswith("optimize@"))

    def _run(self, steps: Sequence[str], name: str, environment: Mapping[str, str]) -> int:
        """Run DVC; show what its stages say behind the name of the product; return its exit code."""
        command = [*DVC_REPRO, "--quiet", *steps]
        environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1", WARNED: "1"}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with subprocess.Popen(command, env=environment, **output) as child:  # type: ignore[call-overload]
            self._children.add(child)
            for line in child.stdout or ():
                self._view.show(f"{name}: {line.rstrip()}")
            code: int = child.wait()
            self._children.discard(child)
        return code


def note_made(names: Sequence[str], candidates: Mapping[str, Product]) -> list[str]:
    """Have DVC note stages whose results were made ahead and lie in place, and return these; it runs the others itself.

    Args:
        names: of stages.
        candidates: each with its product.

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
    return list(works)


def describe_pass(product: Product, when: str = "") -> str:
    """Return how the gate of a product ended that stopped nothing.

    Args:
        product: that was judged.
        when: "" or " before".
    """
    outcomes = _read_outcomes(product)
    ships = ", ".join(name if said == "pass" else f"{name} ({said})" for name, said in outcomes.items())
    how = "passed" if set(outcomes.values()) == {"pass"} else "let through by"
    return f"{product.name}: {how} its gate{when}: {ships} ({product.reports / REPORT_FILE}, {product.build / PAGE})"


def _read_outcomes(product: Product) -> dict[str, str]:
    """Return the verdicts of the candidates that ship: one may be let through without a pass.

    That the gate let them through, DVC has said: where no file tells how, nothing is added.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(EvidenceError):
        judgement = read_record(product.reports / VERDICT_FILE, Judgement)
        found = {verdict.candidate: verdict.outcome for verdict in judgement.verdicts}
    return {name: found.get(name, "pass") for name in product.release}
