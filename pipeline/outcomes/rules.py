"""What other people's records are judged by: metrics, tolerances and directions, from options or a policy file.

A metric is one of quantgate's own where the records hold its scores (`task_completion_rate` averages `completed`,
`perplexity_per_token` divides `nll_nats` by `num_tokens`), else a score of the records under its own name: a rate where
every case has 0 or 1 (of the reference alone, where nothing tells a direction), else a mean, or a total divided by the
column `weight`, of which any case may lose as much as the scores span. A table's column that bears the name of one of
quantgate's scores may mean anything: it is its own metric, and quantgate's is computed only where it is named. Which
direction is better must be known: from the records, from quantgate's own metrics, or said; 1 is better than 0 where
nothing else is said and the name does not sound of harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from ruamel.yaml.error import YAMLError

from pipeline.errors import SettingsError
from pipeline.gate.measure import GradedScore
from pipeline.gate.verdicts import GatedTolerance
from pipeline.outcomes.cases import Direction, Outcomes
from pipeline.outcomes.directions import looks_lower
from pipeline.outcomes.registry import Side
from pipeline.outcomes.table import FORMAT, SCORE
from pipeline.products import list_known_metrics
from pipeline.records.record_files import first_problem
from pipeline.settings.base import MIN_REASON, GateSettings, Tier, describe_yaml_error
from pipeline.settings.metrics import MetricDefinition
from pipeline.settings.yaml_files import read_yaml

DEFAULT_TOLERANCE = 0.03  # of a rate: 3 points
DEFAULT_ALPHA = 0.05
# of lm-eval and inspect_ai: right ones among those that are given
_CHOICES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "choice")
_PLAIN_NAMES = {SCORE, "label", "rate", "rating", "result", "value"}  # of which only the file tells what is counted


@dataclass(frozen=True)
class Asked:
    """What was asked of the gate.

    Attributes:
        metrics: names, with "<eval>/" before them or without; empty: the only one there is.
        tolerance: of each metric; None: `DEFAULT_TOLERANCE` for rates, and said for others.
        buckets: tolerances of buckets, of each metric in an eval that has them.
        better: direction by metric.
        accept_gain: by metric, why a gain beyond its tolerance is believed.
    """

    metrics: tuple[str, ...] = ()
    tolerance: float | None = None
    buckets: Mapping[str, float] = field(default_factory=dict)
    tier: Tier = "critical"
    better: Mapping[str, Direction] = field(default_factory=dict)
    alpha: float = DEFAULT_ALPHA
    on_inconclusive: Literal["block", "warn"] = "block"
    accept_gain: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """What a judgement rests on.

    Attributes:
        definitions: by "<eval>/<metric>"; a tolerance without one names outcomes that are not there.
    """

    alpha: float
    on_inconclusive: Literal["block", "warn"]
    tolerances: dict[str, GatedTolerance]
    definitions: dict[str, MetricDefinition]


def plan_rules(asked: Asked, reference: Side, candidate: Side) -> Rules:
    """Turn options into rules.

    Raises:
        SettingsError: a metric or bucket that no outcomes have, or a direction or tolerance that is not known.
    """
    _check_numbers(asked)
    _check_directions(asked.better, reference)
    chosen = _choose_metrics(asked, reference)
    _check_reasons(asked.accept_gain, chosen)
    definitions = _define(chosen, asked.better, reference, candidate)
    tolerances = {}
    for full in chosen:
        buckets = {name: t for name, t in asked.buckets.items() if name in _list_buckets(reference, full)}
        for name, tolerance in buckets.items():
            _check_share(f"--bucket {name}", tolerance, definitions.get(full), full)
        tolerances[full] = GatedTolerance(
            overall=_find_tolerance(asked, definitions.get(full), full),
            buckets=buckets,
            tier=asked.tier,
            accept_gain=_find_reason(asked, full),
        )
    known = {name for full in chosen for name in _list_buckets(reference, full)}
    if chosen and (unknown := sorted(asked.buckets.keys() - known)):
        raise SettingsError(
            f"--bucket {unknown[0]}: no case carries it; the buckets are " + (", ".join(sorted(known)) or "none")
        )
    return Rules(asked.alpha, asked.on_inconclusive, tolerances, definitions)


def load_rules(
    path: Path, better: Mapping[str, Direction], reference: Side, candidate: Side, *, product: str | None = None
) -> Rules:
    """Read a policy: a YAML file with the key `gate` as of a product in params.yaml, which itself is one.

    Args:
        path: of the file.
        better: direction by metric, where the records do not tell it.
        reference: what was read of it.
        candidate: likewise.
        product: whose gate it is, where the file has several.

    Raises:
        SettingsError: the file is missing, not YAML, or not what it must be.
    """
    try:
        content: Any = read_yaml(path)
        where, section = _find_gate(content, product)
        gate = GateSettings.model_validate(section)
    except FileNotFoundError:
        raise SettingsError(f"{path}: expected a policy, found no file") from None
    except OSError as error:
        raise SettingsError(f"{path}: expected a policy, a YAML file: {error.strerror}") from None
    except YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {describe_yaml_error(error)}") from None
    except (TypeError, KeyError):
        raise SettingsError(
            f"{path}: expected the key `gate` with alpha, on_inconclusive and tolerances, as in params.yaml, found none"
        ) from None
    except ValidationError as error:
        raise SettingsError(f"{path}: {where}.{first_problem(error)}") from None
    _check_directions(better, reference)
    tolerances = {name: GatedTolerance(**t.model_dump()) for name, t in gate.tolerances.items()}
    definitions = _define(list(tolerances), better, reference, candidate)
    for name, tolerance in gate.tolerances.items():
        if name in definitions and definitions[name].is_share and (problems := tolerance.find_too_high()):
            raise SettingsError(f"{path}: {where}.tolerances.{name}.{problems[0]}")
    return Rules(gate.alpha, gate.on_inconclusive, tolerances, definitions)


def _find_gate(content: Any, product: str | None) -> tuple[str, Any]:
    """Return the section `gate` of a file and where it stands there; raises KeyError or TypeError where it has none."""
    if "products" not in content:
        if product is not None:
            raise SettingsError(f"--product: expected none, as the policy has no products, got {product!r}")
        return "gate", content["gate"]
    names = [str(name) for name in content["products"]]
    chosen = names[0] if product is None and len(names) == 1 else product
    if chosen not in names:
        raise SettingsError(f"--product: expected one of {', '.join(names)}, got {product or 'none'}")
    return f"products.{chosen}.gate", content["products"][chosen]["gate"]


def list_metrics(outcomes: Outcomes) -> list[str]:
    """Name the metrics that an eval can be judged by: quantgate's own, then the scores that none of them uses."""
    own = [] if outcomes.format == FORMAT else _list_own(outcomes)
    weights = {outcomes.weight, *(d.weight for d in outcomes.definitions.values())}
    used = {key for m in own for key in (m.score, m.weight)} | weights
    return [m.name for m in own] + [name for name in outcomes.scores if name not in used]


def _list_own(outcomes: Outcomes) -> list[MetricDefinition]:
    """Return those of quantgate's metrics whose scores the records hold, but for names that are scores themselves."""
    scores = set(outcomes.scores)
    return [m for m in list_known_metrics().values() if _has_own(m, scores) and m.name not in scores]


def _has_own(metric: MetricDefinition, scores: set[str]) -> bool:
    needed = {metric.score, metric.weight or metric.score}
    return metric.is_gated and metric.estimator != "average_precision" and needed <= scores


def _check_numbers(asked: Asked) -> None:
    if not 0.001 <= asked.alpha <= 0.2:  # the bounds of gate.alpha
        raise SettingsError(f"--alpha: expected 0.001 to 0.2, got {asked.alpha:g}")
    numbers = {"--tolerance": asked.tolerance, **{f"--bucket {name}": t for name, t in asked.buckets.items()}}
    for name, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise SettingsError(f"{name}: expected a number above 0, got {value:g}")


def _check_reasons(reasons: Mapping[str, str], chosen: list[str]) -> None:
    """Refuse to accept a gain without a reason, or of a metric that is not gated."""
    for name, why in reasons.items():
        if len(why.strip()) < MIN_REASON:
            raise SettingsError(
                f"--accept-gain {name}: expected a reason, a sentence of {MIN_REASON} characters or more, got {why!r}"
            )
        if chosen and not any(name in (full, full.partition("/")[2]) for full in chosen):
            raise SettingsError(f"--accept-gain {name}: no such metric is gated; those that are: {', '.join(chosen)}")


def _find_reason(asked: Asked, full: str) -> str | None:
    why = asked.accept_gain.get(full, asked.accept_gain.get(full.partition("/")[2]))
    return None if why is None else why.strip()


def _check_directions(better: Mapping[str, Direction], reference: Side) -> None:
    """Refuse a direction of a metric that is not there: misspelt, it would leave the right one as it is."""
    names = {
        name: [*outcomes.scores, *(m.name for m in _list_own(outcomes))]
        for name, outcomes in reference.outcomes.items()
    }
    known = {full for name, metrics in names.items() for metric in metrics for full in (metric, f"{name}/{metric}")}
    if (reference.outcomes or not reference.problems) and (unknown := sorted(better.keys() - known)):
        raise SettingsError(
            f"--better {unknown[0]}: no such metric; the reference has "
            + (", ".join(f"{name}/{m}" for name, found in names.items() for m in found) or "none")
        )


def _choose_metrics(asked: Asked, reference: Side) -> list[str]:
    """Return the metrics to gate as "<eval>/<metric>"."""
    available = {
        f"{name}/{metric}": metric for name, outcomes in reference.outcomes.items() for metric in list_metrics(outcomes)
    }
    if not available and reference.problems:
        return []  # refused for that
    names = ", ".join(available) or "none"
    if not asked.metrics:
        for name, outcomes in reference.outcomes.items():
            if not list_metrics(outcomes):
                raise SettingsError(
                    f"{outcomes.path}: expected scores that are numbers, or true and false, found none; write each as "
                    "a number, such as 1 for yes"
                )
            if sum(full.startswith(f"{name}/") for full in available) != 1:
                raise SettingsError(f"{name}: name the metrics to judge with --metric; the reference has {names}")
        return list(available)
    nameable = available | {
        f"{name}/{own.name}": own.name for name, outcomes in reference.outcomes.items() for own in _list_own(outcomes)
    }
    chosen: list[str] = []
    for metric in asked.metrics:
        found = [full for full, short in nameable.items() if metric in (full, short)]
        if not found:
            raise SettingsError(f"--metric {metric}: no such metric; the reference has {names}")
        chosen += [full for full in found if full not in chosen]
    return chosen


def _define(
    names: list[str], better: Mapping[str, Direction], reference: Side, candidate: Side
) -> dict[str, MetricDefinition]:
    found: dict[str, MetricDefinition] = {}
    for full in names:
        eval_name, _, metric = full.partition("/")
        if eval_name in reference.outcomes:
            ours = reference.outcomes[eval_name]
            definition = _define_metric(
                metric, ours, candidate.outcomes.get(eval_name, ours), better.get(full, better.get(metric))
            )
            found |= {full: definition} if definition else {}
    return found


def _define_metric(name: str, ours: Outcomes, theirs: Outcomes, better: Direction | None) -> MetricDefinition | None:
    scores = set(ours.scores)
    own = None if ours.format == FORMAT and name in scores else list_known_metrics().get(name)
    known = ours.definitions.get(name) or (own if own and _has_own(own, scores) else None)
    if known is not None:
        return replace(known, better=better) if better else known
    if name not in scores:
        return None
    told = better or ours.better.get(name) or (own.better if own else None)
    # where nothing says that a score is graded, the reference's 0 and 1 do that it is a rate: others are refused
    sides = (ours, theirs) if told else (ours,)
    values = {record.scores.get(name, 0.0) for side in sides for record in side.records}
    is_rate = values <= {0.0, 1.0} and ours.weight is None
    files = " ".join(part.path.stem for part in (ours, *ours.parts))
    sounds_lower = looks_lower(f"{ours.name} {files}" if name in _PLAIN_NAMES else name)
    direction = told or ("higher" if is_rate and not sounds_lower else None)
    if direction is None:
        raise SettingsError(
            f"--metric {name}: the records don't say which direction is better: give --better "
            f"{name}=higher or --better {name}=lower"
        )
    if is_rate:
        is_choice = name.partition(",")[0] in _CHOICES
        return MetricDefinition(name, "proportion", name, direction, "", is_choice=is_choice)
    return GradedScore(name, "ratio" if ours.weight else "mean", name, direction, "", weight=ours.weight)


def _find_tolerance(asked: Asked, definition: MetricDefinition | None, full: str) -> float:
    if asked.tolerance is not None:
        _check_share("--tolerance", asked.tolerance, definition, full)
        return asked.tolerance
    if definition is not None and definition.estimator != "proportion":
        raise SettingsError(
            f"--metric {full}: it is no rate of 0 and 1, so say with --tolerance what may be lost, in "
            "its own unit (of a perplexity as a share: 0.02 is 2 %)"
        )
    return DEFAULT_TOLERANCE


def _check_share(option: str, tolerance: float, definition: MetricDefinition | None, full: str) -> None:
    if definition is not None and definition.is_share and tolerance >= 1:
        raise SettingsError(
            f"{option}: expected less than 1 for {full} (0.03 is 3 points, of a perplexity 3 %), got {tolerance:g}"
        )


def _list_buckets(side: Side, full: str) -> set[str]:
    outcomes = side.outcomes.get(full.partition("/")[0])
    return {bucket for record in outcomes.records for bucket in record.buckets} if outcomes else set()
