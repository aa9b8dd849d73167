"""What the gate asks now and asked at the last release: a setting that became looser needs a reason.

A threshold that is relaxed whenever it fails protects nothing. The last release keeps its policy in its manifest; each
setting that would let more through than that one did must stand in `gate.loosened` with its old value and why, and the
report prints it. Nothing is compared before a first release. Stricter settings need nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import EvidenceError, SettingsError
from pipeline.gate.verdicts import GatedTolerance, Policy
from pipeline.settings import RELEASES

MANIFEST = "manifest.json"
_TIERS = ("advisory", "supporting", "critical")  # from loose to strict
Value = float | str | None


def check_loosening(policy: Policy, root: Path) -> None:
    """Check that every setting looser than at the last release has its reason.

    Raises:
        SettingsError: one has none, or its reason speaks of another value.
        EvidenceError: the last release's manifest can't be read.
    """
    path = root / RELEASES[policy.track] / MANIFEST
    if not path.is_file():
        return
    try:
        last = Policy.model_validate(json.loads(path.read_bytes())["policy"])
    except (KeyError, ValueError) as error:
        raise EvidenceError(f"{path}: expected the manifest of a release, with its policy, found none "
                            f"({type(error).__name__}); take the file from git again") from None
    for key, was, now in list_loosened(last, policy):
        reason = policy.loosened.get(key)
        if reason is None:
            raise SettingsError(f"{_name(policy)}gate.loosened: expected {key!r} with a reason, as it was {_tell(was)} "
                                f"at the last release ({path}) and is {_tell(now)}; add {{was: {was}, why: ...}}, or "
                                "set it back")
        if reason.was != was:
            raise SettingsError(f"{_name(policy)}gate.loosened.{key}.was: expected {_tell(was)}, as {path} says, got "
                                f"{_tell(reason.was)}; correct it")


def list_loosened(last: Policy, now: Policy) -> Iterator[tuple[str, Value, Value]]:
    """Yield each setting that lets more through: its key in params.yaml, what it was and what it is."""
    if now.alpha > last.alpha:
        yield "alpha", last.alpha, now.alpha
    if (last.on_inconclusive, now.on_inconclusive) == ("block", "warn"):
        yield "on_inconclusive", "block", "warn"
    for metric, tolerance in last.tolerances.items():
        yield from _compare_tolerances(f"tolerances.{metric}", tolerance, now.tolerances.get(metric))
    if last.max_slowdown is not None and (now.max_slowdown is None or now.max_slowdown > last.max_slowdown):
        yield "benchmark.max_slowdown", last.max_slowdown, now.max_slowdown
    for name in now.release:
        least, lower = last.min_acceptance.get(name), now.min_acceptance.get(name)
        if least is not None and (lower is None or lower < least):
            yield f"candidates.{name}.min_acceptance", least, lower
        if name in last.exact and name not in now.exact:
            yield f"candidates.{name}.exact", "true", "false"


def _compare_tolerances(
    key: str, last: GatedTolerance, now: GatedTolerance | None
) -> Iterator[tuple[str, Value, Value]]:
    if now is None:
        yield key, "gated", None
        return
    if _TIERS.index(now.tier) < _TIERS.index(last.tier):
        yield f"{key}.tier", last.tier, now.tier
    limits = {"overall": (last.overall, now.overall)}
    limits |= {f"buckets.{name}": (was, now.buckets.get(name)) for name, was in last.buckets.items()}
    for part, (was, allowed) in limits.items():
        if was is not None and (allowed is None or allowed > was):
            yield f"{key}.{part}", was, allowed


def _tell(value: Value) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else value


def _name(policy: Policy) -> str:
    return "" if policy.track == "text" else f"{policy.track}."
