"""What the gate asks now and asked at the last release: a setting that became looser needs a reason.

A threshold that is relaxed whenever it fails protects nothing. The last release keeps its policy in its manifest; each
setting that would let more through than that one did must stand in `gate.loosened` with its old value and why, and the
report prints it. Another reference, by name or by weights, or another setting of an eval that is gated, asks another
question: nobody can say that it is as strict, so it needs a reason too. Nothing is compared before a first release.
Stricter settings need none.

A pull request writes its own manifest, so CI compares with that of the branch it goes to as well. Not seen: other cases
in the same evalset folder, and the engine and steps of a candidate, which is what is judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.digests import digest_checkpoint
from pipeline.errors import EvidenceError, SettingsError
from pipeline.gate.verdicts import GatedTolerance, Policy
from pipeline.settings import RELEASES

MANIFEST = "manifest.json"
_TIERS = ("advisory", "supporting", "critical")  # from loose to strict
Value = float | str | None


def check_loosening(policy: Policy, root: Path, *, checkpoint: str) -> None:
    """Check that every setting looser than at the last release has its reason.

    Args:
        policy: what is asked now.
        root: of the project.
        checkpoint: folder of the reference's weights; in a clone without it they are not compared.

    Raises:
        SettingsError: one has none, or its reason speaks of another value.
        EvidenceError: the last release's manifest can't be read.
    """
    path = root / RELEASES[policy.track] / MANIFEST
    if path.is_file():
        weights = digest_checkpoint(root / checkpoint) if (root / checkpoint).is_dir() else None
        compare_with_release(policy, path.read_bytes(), path, weights=weights)


def compare_with_release(policy: Policy, manifest: bytes, source: Path | str, *, weights: str | None) -> None:
    """Check that every setting looser than in the manifest of a release has its reason.

    Args:
        policy: what is asked now.
        manifest: of the release.
        source: where it is from, for messages.
        weights: digest of the reference's now; None: not known.

    Raises:
        SettingsError: one has none, or its reason speaks of another value.
        EvidenceError: it is no manifest.
    """
    try:
        content = json.loads(manifest)
        last = Policy.model_validate(content["policy"])
        pinned = content.get("reference", {}).get("weights_digest")
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{source}: expected the manifest of a release, with its policy, found none "
                            f"({type(error).__name__}); take the file from git again") from None
    changed = [("reference.weights", pinned[:12], weights[:12])] if pinned and weights not in (None, pinned) else []
    for key, was, now in [*changed, *list_loosened(last, policy)]:
        reason = policy.loosened.get(key)
        if reason is None:
            raise SettingsError(f"{_name(policy)}gate.loosened: expected {key!r} with a reason, as it was {_tell(was)} "
                                f"at the last release ({source}) and is {_tell(now)}; add "
                                f"{{was: {json.dumps(was)}, why: ...}}, or set it back")
        if reason.was != was:
            raise SettingsError(f"{_name(policy)}gate.loosened.{key}.was: expected {_tell(was)}, as {source} says, got "
                                f"{_tell(reason.was)}; correct it")


def list_loosened(last: Policy, now: Policy) -> Iterator[tuple[str, Value, Value]]:
    """Yield each setting that lets or may let more through: its key in params.yaml, what it was and what it is."""
    if now.reference != last.reference:
        yield "reference", last.reference, now.reference
    yield from _compare_evals(last, now)
    if now.alpha > last.alpha:
        yield "alpha", last.alpha, now.alpha
    if (last.on_inconclusive, now.on_inconclusive) == ("block", "warn"):
        yield "on_inconclusive", "block", "warn"
    for metric, tolerance in last.tolerances.items():
        yield from _compare_tolerances(f"tolerances.{metric}", tolerance, now.tolerances.get(metric))
    if last.max_slowdown is not None and (now.max_slowdown is None or now.max_slowdown > last.max_slowdown):
        yield "benchmark.max_slowdown", last.max_slowdown, now.max_slowdown
    noticed, rate = last.canary.get("target_rate"), now.canary.get("target_rate")
    if noticed is not None and (rate is None or rate > noticed):
        yield "canary.target_rate", noticed, rate
    if last.max_slowdown is not None:
        for name in (set(last.benchmarked) - set(now.benchmarked)) & set(now.release):
            yield f"benchmark.candidates.{name}", "timed", None
    yield from _compare_candidates(last, now)


def _compare_candidates(last: Policy, now: Policy) -> Iterator[tuple[str, Value, Value]]:
    """Compare what was asked of single candidates; one of another name in the place of one that is gone inherits it."""
    new = set(now.release) - set(last.release)
    for name in last.release:
        heirs = {name} & set(now.release) or new
        least = last.min_acceptance.get(name)
        for heir in sorted(heirs):
            lower = now.min_acceptance.get(heir)
            if least is not None and (lower is None or lower < least):
                yield f"candidates.{heir}.min_acceptance", least, lower
            if name in last.exact and heir not in now.exact:
                yield f"candidates.{heir}.exact", "true", "false"


def _compare_evals(last: Policy, now: Policy) -> Iterator[tuple[str, Value, Value]]:
    """Compare the settings of the evals that were gated; one that is gone has lost its tolerances, which is seen."""
    for name in dict.fromkeys(metric.rpartition("/")[0] for metric in last.tolerances):
        was, settings = last.evals.get(name, {}), now.evals.get(name, {})
        # a key that only one side has came or went with the code or with `kind`
        for key in [key for key in was if key in settings]:
            if settings[key] != was[key]:
                yield f"evals.{name}.{key}", _as_value(was[key]), _as_value(settings[key])


def _as_value(setting: Any) -> Value:
    """Return a setting as `was` takes it: a number, or text."""
    if isinstance(setting, (int, float)) and not isinstance(setting, bool):
        return float(setting)
    return setting if isinstance(setting, str) else "not set" if setting is None else json.dumps(setting)


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
