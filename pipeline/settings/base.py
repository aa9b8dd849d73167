"""What the settings of every product share: strictness, the gate's section, and how a product is put together.

A product is what a team ships and gates on its own, with a reference, candidates, evals and a gate. Each kind of
product has its own file of settings; `params.py` reads params.yaml and holds them together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from ruamel.yaml.error import MarkedYAMLError

from pipeline.errors import format_key, show_value
from pipeline.settings.hub_names import SCHEME, find_unpinned
from pipeline.settings.metrics import MetricDefinition

BUILD = Path("build")  # what stages make, a folder a product
REPORTS = Path("reports")  # what people read, likewise
METRICS = Path("metrics")  # what DVC compares, likewise
RELEASE = Path("release")  # what went out, likewise
ENV = BUILD / "env"  # what stage env found, for all products


Tier = Literal["critical", "supporting", "advisory"]  # of a metric
MAX_EVAL_NAME = 64  # characters; with a metric and a bucket of 100 it names a metric of MLflow, which has 250 at most
MIN_REASON = 10  # characters: a sentence
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=MIN_REASON)]


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused, no type coercion, finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Tolerance(Settings):
    """The loss that a metric may show: absolute, in the metric's unit where it has one, relative for perplexity.

    A critical metric must be proven to be within it; a supporting one must not be seen beyond it, as if
    `on_inconclusive` were warn; an advisory one is judged and shown, and stops nothing. A gain larger than it is
    inconclusive, unless `accept_gain` says why it is believed.
    """

    overall: float | None = Field(default=None, gt=0)
    buckets: dict[str, Annotated[float, Field(gt=0)]] = {}
    tier: Tier = "critical"
    accept_gain: Reason | None = None

    def find_too_high(self) -> list[str]:
        """Return what is wrong for a metric of which 1 is all there is, one line each, starting with the key."""
        limits = {"overall": self.overall} | {f"buckets.{name}": limit for name, limit in self.buckets.items()}
        return [
            f"{key}: expected less than 1 (0.03 is 3 points, of a perplexity 3 %), got {limit:g}"
            for key, limit in limits.items()
            if limit is not None and limit >= 1
        ]


class Loosened(Settings):
    """A setting that lets more through than it did at the last release: from what to what, and why."""

    was: float | str
    now: float | str  # a reason holds for this value alone
    why: Reason


class GateSettings(Settings):
    """The decision rule's settings; what they mean is in `pipeline/gate/compare.py`."""

    alpha: float = Field(ge=0.001, le=0.2)  # outside, nothing fails or nothing passes
    on_inconclusive: Literal["block", "warn"]
    tolerances: dict[str, Tolerance] = Field(min_length=1)
    tripwires: dict[str, Annotated[float, Field(gt=0)]] = {}
    loosened: dict[str, Loosened] = {}  # by its key: why a setting is looser than at the last release


class Eval(Settings):
    """Base of an eval's settings, and as class attributes what the pipeline asks of its kind.

    Attributes:
        metrics: what follows from its cases; the first is its headline.
        chats: its cases are conversations, so that the path that answers can be asked twice and timed.
        keeps_arrays: its metrics are computed from the arrays beside its records, so that a release keeps both.
        hub_task: the name that model hubs have for what it measures.
    """

    kind: str
    metrics: ClassVar[tuple[MetricDefinition, ...]]
    chats: ClassVar[bool] = False
    keeps_arrays: ClassVar[bool] = False
    hub_task: ClassVar[str]


# Of a candidate: a profiler's trace of a few steps is kept beside its evaluation. It changes no result, so no record of
# settings has it.
Trace = Annotated[bool, Field(exclude=True)]


class Product(Settings):
    """One product: what is compared with what, on which evals, and what may be lost.

    A section of `products` in params.yaml. Its name and its candidates stand elsewhere in the file: the name is the
    section's key, and a candidate names its product.

    Attributes:
        takes_hub_models: a checkpoint may be a pinned model of a hub.
        workers_key: the setting in `resources` that says how many processes work at once.
    """

    takes_hub_models: ClassVar[bool] = False
    workers_key: ClassVar[str] = "num_workers"
    name: str
    kind: str
    reference: str
    release: list[str] = Field(min_length=1)
    candidates: dict[str, Any]
    evals: dict[str, Any] = Field(min_length=1)
    gate: GateSettings
    # why a candidate may be released whose number formats were only emulated, or left out, where it was evaluated
    allow_emulated: Reason | None = None

    @property
    def build(self) -> Path:
        """The folder of what stages make of it."""
        return BUILD / self.name

    @property
    def reports(self) -> Path:
        """The folder of its report."""
        return REPORTS / self.name

    @property
    def metrics(self) -> dict[str, MetricDefinition]:
        """What its evals measure, by "<eval>/<metric>"."""
        return {f"{name}/{metric.name}": metric for name, e in self.evals.items() for metric in e.metrics}

    def show_allowance(self) -> str:
        """Return the line of params.yaml that allows what was emulated, for messages."""
        return f"`allow_emulated: <why>` in products.{self.name}"

    def list_rules(self) -> dict[str, Any]:
        """Return what it asks of the gate in other sections than `gate`, as fields of a Policy."""
        return {}

    def use_workers(self, num_workers: int) -> Self:
        """Return the settings with so many processes at once, which changes no result."""
        if (resources := getattr(self, "resources", None)) is None:
            return self
        return self.model_copy(update={"resources": resources.model_copy(update={self.workers_key: num_workers})})

    @property
    def num_workers(self) -> int:
        """How many processes it has at once; 1 for a kind without such a setting."""
        return int(getattr(getattr(self, "resources", None), self.workers_key, 1))

    def count_whole_gpus(self, candidate: str) -> int:
        """Return how many GPUs nobody else may use while a candidate of that name is evaluated; 0: it shares them."""
        return 0

    def restrict(self, names: Collection[str]) -> Self:
        """Return the settings with only these candidates."""
        kept = {name: candidate for name, candidate in self.candidates.items() if name in names}
        return self.model_copy(update={"candidates": kept})

    def name_in(self, line: str) -> str:
        """Return a line about the product with its name before it, unless a path in its section begins the line."""
        return line if line.startswith(f"products.{self.name}.") else f"{self.name}: {line}"

    def locate(self, key: str) -> str:
        """Return where a setting stands in params.yaml.

        Args:
            key: dotted, from the product; candidates are not inside its section.
        """
        return key if key.partition(".")[0].rstrip(":") == "candidates" else f"products.{self.name}.{key}"


def find_product_problems(product: Product) -> list[str]:
    """Return what is wrong with the names of a product, one line each, starting with the key's path."""
    problems = [
        f"evals.{format_key(name)}: expected a name of at most {MAX_EVAL_NAME} lower-case letters, digits, dashes "
        f"and underscores that begins with a letter or digit, got {show_value(name)}"
        for name in product.evals
        if len(name) > MAX_EVAL_NAME or not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name)
    ]
    problems += [
        f"candidates.{name}.checkpoint: {problem}"
        for name, candidate in product.candidates.items()
        if (problem := _find_other_place(product, candidate.checkpoint))
    ]
    known = ", ".join(product.candidates)
    if product.reference not in product.candidates:
        problems.append(f"reference: expected one of the candidates ({known}), got {product.reference!r}")
    if product.reference in product.candidates and product.candidates[product.reference].steps:
        problems.append(
            f"candidates.{product.reference}.steps: expected none, as it is the reference: what the steps "
            "cost would not show; name a candidate without steps as the reference"
        )
    for i, name in enumerate(product.release):
        if name not in product.candidates:
            problems.append(f"release.{i}: expected one of the candidates ({known}), got {name!r}")
        if name == product.reference:
            problems.append(
                f"release.{i}: {name!r} is the reference, and a comparison with itself proves nothing; "
                "name another candidate"
            )
        if name in product.release[:i]:
            problems.append(f"release.{i}: {name!r} is listed twice; remove one")
    return problems


def _find_other_place(product: Product, reference: str) -> str | None:
    """Say why a checkpoint can't be had from where it is said to be; None: it can, or it is a folder."""
    if reference.startswith(SCHEME) and not product.takes_hub_models:
        return f"expected a folder for a product of kind {product.kind}, got {reference!r}; download it into one"
    return find_unpinned(reference)


def find_metric_problems(product: Product) -> list[str]:
    """Return the tolerances and tripwires that no eval of the product has a metric for or can show, one line each."""
    problems = []
    for section, gating in (("tolerances", True), ("tripwires", False)):
        metrics = {name for name, metric in product.metrics.items() if metric.is_gated == gating}
        for metric in getattr(product.gate, section):
            if metric not in metrics:
                problems.append(
                    f"gate.{section}.{format_key(metric)}: no such metric; the evals give "
                    + (", ".join(sorted(metrics)) or "none")
                )
    problems += [
        f"gate.tolerances.{metric}: expected `overall`, `buckets` or both, got neither"
        for metric, t in product.gate.tolerances.items()
        if t.overall is None and not t.buckets
    ]
    shares = {name for name, metric in product.metrics.items() if not metric.unit}
    problems += [
        f"gate.tolerances.{metric}.{problem}"
        for metric, t in product.gate.tolerances.items()
        if metric in shares
        for problem in t.find_too_high()
    ]
    return problems


def find_unwatched_evals(product: Product, metric: str, harm: str) -> list[str]:
    """Return the evals whose outputs may be unsound without a tolerance for that, one line each.

    Args:
        product: whose evals all have the metric.
        metric: the rate of sound outputs.
        harm: what would pass, for the message.
    """
    tolerances = {name: product.gate.tolerances.get(f"{name}/{metric}") for name in product.evals}
    return [
        f"gate.tolerances: expected {name}/{metric} with an overall tolerance that can stop a release, found "
        f"{'an advisory one' if tolerance and tolerance.overall else 'none'}; {harm} must not pass for want of one"
        for name, tolerance in tolerances.items()
        if tolerance is None or tolerance.overall is None or tolerance.tier == "advisory"
    ]


def find_repeated_steps(steps: Sequence[Any]) -> list[str]:
    """Return the steps of a candidate that stand there twice, one line each."""
    kinds = [step.kind for step in steps]
    return [f"steps.{i}: {kind} is there twice; remove one" for i, kind in enumerate(kinds) if kind in kinds[:i]]


def find_window_problems(steps: Sequence[Any]) -> list[str]:
    """Return the tiling steps whose window has nothing to blend, one line each, starting with the key's path."""
    return [
        f"steps.{i}.overlap: expected a pixel or more for window {step.window} to blend, got {step.overlap:g} of a "
        f"tile of {step.tile}; raise it, or set window: none"
        for i, step in enumerate(steps)
        if getattr(step, "window", "none") != "none" and step.tile * step.overlap < 1
    ]


def describe_yaml_error(error: Exception) -> str:
    """Say in one line what is wrong and on which line; the parser's own text draws a picture over several."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())
