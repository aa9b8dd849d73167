"""A copy of a finished project, in which one thing is changed and the real stages run.

The copy is cut down to the reference and one candidate of one product. Stages run in its folder as a user runs them,
with real checkpoints, servers and records. Speed is judged only where it is asked for: other weights than the timed
ones would be refused for that alone.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from ruamel.yaml import YAML

from pipeline.gate.verdicts import VERDICT_FILE, Judgement
from pipeline.products.params import get_product, load_params
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import BuiltCandidate, CaseRecord, Evaluation, read_cases
from pipeline.records.record_files import read_record, write_cases, write_record
from pipeline.records.verdicts import Verdict
from pipeline.settings.base import BUILD, METRICS, REPORTS, Product
from stages.cli import run_stage
from tests.fakes.synthetic_records import PRODUCT

P = TypeVar("P", bound=Product)


class StoppedError(Exception):
    """A stage ended with an error: the release does not go on."""

    def __init__(self, stage: str, line: str) -> None:
        super().__init__(line)
        self.stage, self.line = stage, line


class Trial:
    """A copy of a finished project with the reference and one candidate of one product."""

    def __init__(
        self,
        project: Path,
        root: Path,
        *,
        product: str = PRODUCT,
        candidate: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Copy what the stages read.

        Args:
            project: a project whose stages have all run.
            root: folder of the copy; must not exist.
            product: of the project.
            candidate: None: the first of the product's release.
            settings: of a new candidate.
        """
        self.project, self.root, self.product, self.build = project, root, product, root / BUILD / product
        self.params: dict[str, Any] = YAML(typ="safe").load((project / "params.yaml").read_text(encoding="utf-8"))
        self.params["products"] = {product: self.params["products"][product]}
        self.name: str = candidate or self.section["release"][0]
        self.reference: str = self.section["reference"]
        known = self.params["candidates"] | ({self.name: settings | {"product": product}} if settings else {})
        self.params["candidates"] = {name: known[name] for name in (self.reference, self.name)}
        self.section["release"] = [self.name]
        self.section["gate"].pop("loosened", None)  # in the copy nothing was released before
        if "benchmark" in self.section:
            self.section["benchmark"]["candidates"] = []
        for part in ("models", "evalsets", "build/env"):
            if (project / part).is_dir():
                shutil.copytree(project / part, root / part)
        for name in (self.reference,) if settings else (self.reference, self.name):
            for part in ("candidates", "evaluations"):
                shutil.copytree(project / BUILD / product / part / name, self.build / part / name)
        self.write()

    @property
    def section(self) -> dict[str, Any]:
        """The product's part of params.yaml, to be edited; `write` writes it."""
        section: dict[str, Any] = self.params["products"][self.product]
        return section

    @property
    def settings(self) -> dict[str, Any]:
        """The candidate's own part of it."""
        settings: dict[str, Any] = self.params["candidates"][self.name]
        return settings

    @property
    def evaluation(self) -> Path:
        """Folder of the candidate's records."""
        return self.build / "evaluations" / self.name

    def write(self) -> None:
        """Write params.yaml; JSON is YAML."""
        (self.root / "params.yaml").write_text(json.dumps(self.params, indent=1), encoding="utf-8")

    def load(self, kind: type[P]) -> P:
        """Return the product's settings as the stages read them."""
        return get_product(load_params(self.root / "params.yaml"), self.product, kind=kind)

    def find_eval(self, kind: str) -> str:
        """Return the name of the first eval of a kind."""
        return next(name for name, settings in self.section["evals"].items() if settings["kind"] == kind)

    def keep_evals(self, *kinds: str) -> None:
        """Leave evals of these kinds, and what the gate asks of them; the reference answers their canary."""
        evals = {name: e for name, e in self.section["evals"].items() if e["kind"] in kinds}
        self.section["evals"] = evals
        for part in ("tolerances", "tripwires"):
            metrics = self.section["gate"].get(part, {})
            self.section["gate"][part] = {m: t for m, t in metrics.items() if m.partition("/")[0] in evals}
        self.write()
        self.run("evaluate", self.reference)  # the canary's prompts are taken from all evals that chat

    def run(self, stage: str, *argv: str) -> str:
        """Run a stage in the copy's folder; return what it printed.

        Raises:
            StoppedError: it did not end well.
        """
        code, printed, said = run_in(self.root, stage, *argv)
        if code:
            lines = [line for line in said.splitlines() if line.startswith("quantgate ")]
            raise StoppedError(stage, lines[-1].partition(": ")[2] if lines else f"exit code {code}")
        return printed

    def optimize(self) -> None:
        """Build the candidate."""
        self.run("optimize", self.name)

    def evaluate(self) -> None:
        """Evaluate the candidate."""
        self.run("evaluate", self.name)

    def compare(self) -> None:
        """Judge the candidate; where a kind has nothing to time, its stage `benchmark` compares pictures before."""
        if "benchmark" not in self.section:
            self.run("benchmark", self.product)
        self.run("compare", self.product)

    def read_verdict(self) -> Verdict:
        """Read the verdict on the candidate, edited or not."""
        return read_record(self.verdict_path, Judgement).verdicts[0]

    @property
    def verdict_path(self) -> Path:
        """What compare writes and the gate reads."""
        return self.root / REPORTS / self.product / VERDICT_FILE

    @property
    def metrics_path(self) -> Path:
        """Folder of the numbers that git keeps."""
        return self.root / METRICS / self.product

    def change_weights(self, change: Callable[[Path], None]) -> None:
        """Change the folder of the candidate's weights, and its record alike: as if the step had made it so."""
        path = self.build / "candidates" / self.name / "candidate.json"
        built = read_record(path, BuiltCandidate)
        folder = self.root / built.checkpoint.path
        if not folder.is_relative_to(self.build):  # a shipped checkpoint, which the reference has too
            folder = shutil.copytree(folder, self.root / "models/changed")
            self.settings["checkpoint"] = "models/changed"
            self.write()
        change(folder)
        made = read_checkpoint(folder, root=self.root, parent_digest=built.checkpoint.parent_digest)
        write_record(path, built.model_copy(update={"checkpoint": made}))

    def change_records(self, eval_name: str, change: Callable[[list[CaseRecord]], list[CaseRecord]]) -> None:
        """Change the records of one eval and seal them again: as if the evaluation had written them so."""
        path = self.evaluation / f"{eval_name}.jsonl"
        records = change(read_cases(path))
        write_cases(path, records)
        index = read_record(self.evaluation / "evaluation.json", Evaluation)
        sealed = index.evals[eval_name].model_copy(update={"sha256": digest_file(path), "num_cases": len(records)})
        write_record(
            self.evaluation / "evaluation.json", index.model_copy(update={"evals": index.evals | {eval_name: sealed}})
        )


def run_in(folder: Path, stage: str, *argv: str) -> tuple[int, str, str]:
    """Run `python -m stages.STAGE ARGV` in a project; return its exit code, what it printed, and that on stderr."""
    printed, said = io.StringIO(), io.StringIO()
    main = importlib.import_module(f"stages.{stage}").main
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(mock.patch.object(sys, "argv", ["", *argv]))
        try:
            run_stage(stage, main)
        except SystemExit as ended:
            return int(ended.code or 0), printed.getvalue(), said.getvalue()
    raise AssertionError("unreachable")
