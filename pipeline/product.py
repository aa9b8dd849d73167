"""What a kind of product gives: the one interface between the pipeline and `pipeline/products/<kind>/`.

A kind is listed in `pipeline/products/__init__.py`. Its methods import what they need themselves: a stage's code is
what the methods that it calls lead to, and no other kind's (`stage_code.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipeline.running.environment import Machine
from pipeline.settings.base import Eval, Product

if TYPE_CHECKING:  # else an edit of gate or report would make stale what every stage made
    from pipeline.gate.audits import Auditor
    from pipeline.report.presenting import Presenter
    from pipeline.running.shards import Shard

P = TypeVar("P", bound=Product)
Watched = dict[str, Any]  # what a stage's result depends on, by a name that says what changed


@dataclass(frozen=True)
class Inputs:
    """What the results of a product depend on beside its checkpoints: what DVC watches.

    Attributes:
        optimize: by candidate.
        evaluate: by candidate.
        benchmark: of the product.
    """

    optimize: Mapping[str, Watched]
    evaluate: Mapping[str, Watched]
    benchmark: Watched = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """What a new product starts with (`quantgate init`).

    Attributes:
        section: of `products` in params.yaml, with its comments.
        candidates: those of `candidates`, likewise.
        files: an evalset of example cases, and what else it names; contents by path from the root.
        warnings: lines about what could not be had.
    """

    section: str
    candidates: str
    files: Mapping[Path, bytes]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpenReplica:
    """A candidate that is loaded or served, and evaluates shards.

    Attributes:
        run: evaluates a shard under `build/shards/<name>/`; returns the number of its entries. Called for as many at
            once as the kind says.
        finish: makes `build/evaluations/<name>/` of all shards and of what replicas prepared; does what is missing of
            that itself. The replica does nothing after it.
        prepare: does one part of what comes after the shards, by its number and how many there are, as of shards;
            returns what `finish` takes, or None where it is not divided.
    """

    run: Callable[[Shard], int]
    finish: Callable[[Sequence[bytes]], None]
    prepare: Callable[[int, int], bytes | None] = lambda number, count: None


class Kind(Protocol[P]):
    """A kind of product: its settings and their checks, the work of its stages, and who judges and shows it."""

    settings: type[P]
    evals: Mapping[str, type[Eval]]  # the settings of each kind of eval, which say what it measures
    start_options: Mapping[str, str]  # what `start_product` may be told beside name and checkpoint, with a line of help
    shards_at_once: int  # of a replica: more than one where the last cases of a shard would leave it idle
    has_servers: bool  # that answer for its candidates, beside the process that asks them

    def start_product(self, name: str, checkpoint: str, root: Path, options: Mapping[str, str]) -> Start:
        """Return the smallest settings of a new product that run, as its checkpoint allows them, and example cases.

        Raises:
            QuantgateError: the checkpoint can't be used, or an option is missing or wrong.
        """

    def find_problems(self, product: P) -> list[str]:
        """Return what contradicts itself in params.yaml, one line each, starting with the key from the product."""

    def check(self, product: P, root: Path, machine: Machine, *, is_local: bool) -> list[str]:
        """Check the settings against the files that they name and this machine; return warnings.

        Args:
            product: settings.
            root: of the project.
            machine: this one.
            is_local: work is done here: what is not here is refused, not warned of.

        Raises:
            SettingsError: with the path of the key, what it names, and what there is.
            EvalsetError: with file and line.
            CheckpointError: a checkpoint that can't be used.
        """

    def render_costs(self, product: P, root: Path, machine: Machine, *, build: Path) -> str:
        """Return a table of the minutes, memory and disk that each candidate will take; "" where nothing says so."""

    def list_inputs(self, product: P, root: Path) -> Inputs:
        """Return what results depend on: settings as JSON, digests of files."""

    def preload(self, stage: str, product: P, root: Path) -> None:
        """Import what `optimize` or `evaluate` of the product's candidates will import, and do nothing else."""

    def optimize(self, name: str, product: P, *, root: Path, build: Path) -> str:
        """Build a candidate under `build/candidates/<name>/`; return a line that says what it became."""

    def evaluate(self, name: str, product: P, *, root: Path, build: Path) -> None:
        """Evaluate a candidate, and write `build/evaluations/<name>/`."""

    def open_replica(self, name: str, product: P, *, root: Path, build: Path) -> AbstractContextManager[OpenReplica]:
        """Load or serve a candidate once, for shard after shard of its cases."""

    def benchmark(self, product: P, *, root: Path, build: Path) -> list[str]:
        """Time or compare candidates beside the reference under `build/benchmarks/`; return a line on each."""

    def get_auditor(self) -> Auditor[P]:
        """Return what the gate asks of this kind beside the scores."""

    def get_presenter(self) -> Presenter[P]:
        """Return what the report and MLflow show of this kind."""
