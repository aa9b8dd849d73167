"""Judge a product as soon as its candidates are made, while those of other products are still worked on.

DVC notes what was made, and a child of it runs the product's own stages that are out of date, named one by one. Another
`dvc repro` has the last word when all candidates are made: it finds these stages as they should be, or runs again what
is amiss. Products whose kind has servers wait for that: their speed is measured with the machine to itself, and servers
take no turns. So do those without a new candidate, and those with one that DVC could not note.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from pipeline.errors import EvidenceError, QuantgateError
from pipeline.gate.verdicts import REPORT_FILE, VERDICT_FILE, Judgement
from pipeline.products import KINDS
from pipeline.products.inputs import WARNED
from pipeline.products.prefetch import STAGES
from pipeline.products.prefetch_step import TURNS
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

DVC_REPRO = (sys.executable, "-m", "dvc", "--wait-for-lock", "repro")  # others of the run note what they have made
DVC_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", WARNED: "1"}
_NOTING_S = 10.0
_STAGES = ("benchmark", "compare", "track", "gate", "release")  # of a product


class EarlyJudge:
    """Judges products of one run; several threads may have it judge, each another product.

    Attributes:
        steps: of products whose stages all ended well, by name.
        failed: names of products of which a stage did not, the gate in most cases.
        unfit: names of products with whose reference nothing can be compared.
        noted: stages of candidates that DVC has noted.
    """

    def __init__(self, view: View, due: Sequence[str]) -> None:
        """Prepare it.

        Args:
            view: of the run.
            due: the stages that are out of date, in DVC's order.
        """
        self._view, self._due = view, due
        self._children: set[subprocess.Popen[str]] = set()
        self._noting, self._starting = threading.Lock(), threading.RLock()  # a signal may come within `end`
        self._has_ended = False
        self.steps: dict[str, Step] = {}
        self.failed: list[str] = []
        self.unfit: list[str] = []
        self.noted: list[str] = []

    def list_steps(self, product: Product) -> list[str]:
        """Return the stages of a product itself that are out of date; none where it waits for all others."""
        if KINDS[product.kind].has_servers or not self._list_made(product):
            return []
        wanted = [f"{stage}@{product.name}" for stage in _STAGES]
        return [name for name in self._due if name in wanted]

    def find_unfit(self, product: Product) -> list[str]:
        """Return why nothing can be compared with a product's reference: found before hours of work on the others."""
        from pipeline.gate.compare import find_unfit  # takes half a second, which a run without work has not

        if problems := find_unfit(product, KINDS[product.kind].get_auditor(), product.build):
            self.unfit.append(product.name)
        return problems

    def judge(self, product: Product, gpus: str | None) -> None:
        """Have DVC judge a product whose candidates are made; what it can't note of these is left to the last one.

        Args:
            product: all of whose candidates are made.
            gpus: that its stages may use, as CUDA_VISIBLE_DEVICES names them; None: all of this process.
        """
        if not (steps := self.list_steps(product)):
            return
        # minutes, perhaps: whoever wants the machine alone waits, and has all others go on
        with share_machine(TURNS), keep_nobody_waiting():
            if not self._note(product):
                self._view.finish(steps)
                return
            code = self._run(steps, product.name, {} if gpus is None else {VISIBLE: gpus})
            if self._has_ended:
                self._view.finish(steps, "interrupted")
                return
            begun = self._view.finish(steps, "failed" if code else "done")
            if code:
                self.failed.append(product.name)
                self._view.say(
                    f"{product.name}: stopped, as said above; the others go on, and it is tried again after them"
                )
            else:
                self.steps |= begun
                self._view.say(describe_pass(product))

    def end(self) -> None:
        """End what DVC has at work, with its stages, and begin nothing more."""
        with self._starting:
            self._has_ended = True
            for child in self._children:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGTERM)
        if self._noting.acquire(timeout=_NOTING_S):  # half a dvc.lock would be left
            self._noting.release()

    def _list_made(self, product: Product) -> list[str]:
        wanted = {f"{stage}@{name}" for stage in STAGES for name in product.candidates}
        return [name for name in self._due if name in wanted]

    def _note(self, product: Product) -> bool:
        """Have DVC note the candidates; say whether it has noted every evaluation that was out of date."""
        made = self._list_made(product)
        try:
            with self._noting:
                self.noted += note_made(made, dict.fromkeys(product.candidates, product))
        except (QuantgateError, OSError, SyntaxError) as error:  # code that is being edited, perhaps
            self._view.say(f"{product.name}: {format_line(str(error))}")
            return False
        return all(name in self.noted for name in made if not name.startswith("optimize@"))  # one may be restored

    def _run(self, steps: Sequence[str], name: str, environment: Mapping[str, str]) -> int:
        """Run DVC; show what its stages say behind the name of the product; return its exit code."""
        command = [*DVC_REPRO, "--quiet", "--single-item", *steps]
        environment = {**os.environ, **environment, **DVC_ENVIRONMENT}
        with self._starting:
            if self._has_ended:
                return -signal.SIGTERM
            child = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,  # with its stages, which `end` reaches so
            )
            self._children.add(child)
        with child:
            for line in child.stdout or ():
                self._view.show(f"{name}: {line.rstrip()}")
            code = child.wait()
        with self._starting:
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
        work.seal.unlink(missing_ok=True)
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
