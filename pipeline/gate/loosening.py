"""What the gate asks now and asked at the last release: a setting that became looser needs a reason.

A threshold that is relaxed whenever it fails protects nothing. The last release keeps its policy in its manifest; each
setting that would let more through than that one did must stand in `gate.loosened` with its old value, its new one and
why, and the report prints it. Another reference, by name, by weights or by how it is run, or other cases or another
setting of an eval that is gated, ask another question: nobody can say that it is as strict, so it needs a reason too.
Nothing is compared before a first release. Stricter settings need none. A model of another origin starts a new line of
releases by one reason: it stands for all that asks another question, and for nothing that lets more through.

Weights, cases and how the reference is run are known by what was evaluated, so they are compared when the gate judges,
and settings before any work too. A pull request writes its own manifest, so CI compares with that of the branch it goes
to as well. Not seen: the engine and steps of a candidate, which is what is judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.errors import EvidenceError, SettingsError
from pipeline.gate.verdicts import WATCHED_METRIC, GatedTolerance, LoosenedSetting, Policy
from pipeline.records.checksums import SUMS, read_sums
from pipeline.records.digests import digest_bytes, digest_json
from pipeline.records.files import read_bounded
from pipeline.settings.base import RELEASE
from pipeline.settings.metrics import AREAS

MANIFEST = "manifest.json"
_TIERS = ("advisory", "supporting", "critical")  # from loose to strict
# of a serving config
_ELSEWHERE = {"batch_size", "num_threads", "concurrency", "base_url", "api_key_env"}
_CASES = ("evalset", "include_path", "task")  # settings of an eval that say where its cases are
Value = float | str
_NOT_SET = "not set"
_NEW_LINE = "new_line"  # key of the reason for a reference of another origin
_WEIGHTS = "reference.weights"


def name_material(
    *, weights: str | None, cases: Mapping[str, str], serving: str | None = None, adapter: str | None = None
) -> dict[str, str]:
    """Return what candidates are judged by, as keys of `gate.loosened`, with their digests.

    Args:
        weights: digest of the reference's; None: not known.
        cases: digest of each eval's.
        serving: digest of how the reference is run, from `digest_serving`; None: not known.
        adapter: digest of the user's code that a network is run with; None: there is none.
    """
    known = {_WEIGHTS: weights, "reference.serving": serving, "reference.adapter": adapter}
    return {key: digest for key, digest in known.items() if digest is not None} | {
        f"evals.{name}.cases": digest for name, digest in cases.items()
    }


def digest_serving(serving: BaseModel) -> str:
    """Return the digest of how a candidate is run, but for what only says where and how many at once."""
    return digest_json(serving.model_dump(mode="json", exclude=_ELSEWHERE))


def check_loosening(policy: Policy, root: Path, *, material: Mapping[str, str]) -> None:
    """Check that every setting looser than at the last release has its reason.

    Args:
        policy: what is asked now.
        root: of the project.
        material: from `name_material`; empty where nothing was evaluated yet.

    Raises:
        SettingsError: one has none, or its reason speaks of other values.
        EvidenceError: the last release's manifest can't be read, or is not the one that was written.
    """
    path = root / RELEASE / policy.product / MANIFEST
    if path.is_file():
        manifest = path.read_bytes()
        _check_unchanged(manifest, path)
        compare_with_release(policy, manifest, path, material=material)
    elif path.with_name(SUMS).is_file():
        raise EvidenceError(
            f"{path}: expected the manifest of the last release, found none beside its {SUMS}; take it from git again, "
            f"or remove {path.parent} to begin without one"
        )
    elif policy.loosened:
        raise SettingsError(
            f"{_name(policy)}gate.loosened: expected none before a first release, as nothing can be "
            f"looser, got {next(iter(policy.loosened))!r}; remove it"
        )


def _check_unchanged(manifest: bytes, path: Path) -> None:
    """Refuse a manifest that the sums beside it have another digest of; where they have none, nobody can say."""
    sums = path.with_name(SUMS)
    listed = read_sums(read_bounded(sums).decode(errors="replace")) if sums.is_file() else ()
    said = next((digest for name, digest in listed if name == path.name), None)
    found = digest_bytes(manifest)
    if said is not None and said != found:
        raise EvidenceError(
            f"{path}: expected sha256 {said[:12]}, as {sums.name} says, got {found[:12]}; it was changed since "
            "the release; take both from the commit of the release again"
        )


def compare_with_release(policy: Policy, manifest: bytes, source: Path | str, *, material: Mapping[str, str]) -> None:
    """Check that every setting looser than in the manifest of a release has its reason.

    Args:
        policy: what is asked now.
        manifest: of the release.
        source: where it is from, for messages.
        material: as of `check_loosening`.

    Raises:
        SettingsError: one has none, or its reason speaks of other values.
        EvidenceError: it is no manifest.
    """
    try:
        content = json.loads(manifest)
        last = Policy.model_validate(content["policy"])
        cases = {name: kept["digest"] for name, kept in content["evalsets"].items()}
        side = content["reference"]
        pinned = name_material(
            weights=side["weights_digest"],
            cases=cases,
            serving=side.get("serving_digest"),
            adapter=side.get("adapter_digest"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"{source}: expected the manifest of a release, with its policy, found none "
            f"({type(error).__name__}); take the file from git again"
        ) from None
    loosened = list(list_loosened(last, policy))
    loosened += _compare_material(pinned, material, last, {key for key, _, _ in loosened})
    weights = pinned[_WEIGHTS], material.get(_WEIGHTS)
    line = policy.loosened.get(_NEW_LINE)
    if line is None or line == last.loosened.get(_NEW_LINE):  # one that went out says nothing of this release
        named, offer = set[str](), _offer_new_line(*weights)
    else:
        _check_new_line(policy, line, *weights, source)
        named, offer = {_NEW_LINE}, ""
        loosened = [own for own in loosened if own[0] in policy.loosened or not _is_question(own[0], policy)]
    _check_reasons(policy, last, named | {key for key, _, _ in loosened}, knows_material=bool(material))
    if missing := [change for change in loosened if change[0] not in policy.loosened]:
        raise SettingsError(_ask_reasons(policy, missing, source) + offer)
    for key, was, now in loosened:
        reason = policy.loosened[key]
        for part, said, found, whence in (
            ("was", reason.was, was, f"{source} says"),
            ("now", reason.now, now, "is asked now"),
        ):
            if said != found:
                raise SettingsError(
                    f"{_name(policy)}gate.loosened.{key}.{part}: expected {_tell(found)}, as {whence}, "
                    f"got {_tell(said)}; correct it, with its reason"
                )


def _is_question(key: str, policy: Policy) -> bool:
    """Say whether a change asks another question, as another model needs it, and lets nothing more through."""
    gone = key.startswith("tolerances.") and key.removeprefix("tolerances.").partition("/")[0] not in policy.evals
    return gone or key == "reference" or key.startswith(("reference.", "evals."))


def _check_new_line(policy: Policy, line: LoosenedSetting, was: str, now: str | None, source: Path | str) -> None:
    """Refuse a new line of releases whose reference is the old one, or another than its reason says.

    Args:
        policy: what is asked now.
        line: the reason.
        was: digest of the weights of the last release's reference.
        now: of those of this one; None: not known yet.
        source: where the last release is from, for messages.
    """
    where = f"{_name(policy)}gate.loosened.{_NEW_LINE}"
    if was == now:
        raise SettingsError(
            f"{where}: expected a reference of other weights than at the last release ({source}), got the same; "
            "remove it"
        )
    for part, said, found in (("was", line.was, was), ("now", line.now, now)):
        if found is not None and said != found[:12]:
            raise SettingsError(
                f"{where}.{part}: expected {found[:12]}, the reference's weights "
                f"{f'in {source}' if part == 'was' else 'now'}, got {_tell(said)}; correct it, with its reason"
            )


def _offer_new_line(was: str, now: str | None) -> str:
    """Return the end of a refusal that says of a reason for most of it; nothing where the weights are the same.

    Args:
        was: digest of the weights of the last release's reference.
        now: of those of this one; None: not known yet.
    """
    if now is None or now == was:
        return ""
    said = f"{{was: {json.dumps(was[:12])}, now: {json.dumps(now[:12])}, why: ...}}"
    return f"; for a model of another origin {_NEW_LINE}: {said} stands for its reference and its evals"


def _ask_reasons(policy: Policy, missing: list[tuple[str, Value, Value]], source: Path | str) -> str:
    """Say all that needs a reason at once: asked for one by one, another model would take seven runs to learn them."""
    (key, was, now), *others = missing
    shown = [f"{key!r} was {_tell(was)} and is {_tell(now)}" for key, was, now in others]
    likewise = f"; likewise {', '.join(shown)}" if others else ""
    return (
        f"{_name(policy)}gate.loosened: expected {key!r} with a reason, as it was {_tell(was)} "
        f"at the last release ({source}) and is {_tell(now)}; add "
        f"{{was: {json.dumps(was)}, now: {json.dumps(now)}, why: ...}}, or set it back{likewise}"
    )


def _check_reasons(policy: Policy, last: Policy, named: set[str], *, knows_material: bool) -> None:
    """Refuse a reason for a change that nobody made; one that went out may stay until its change is undone."""
    undone = {key for key, _, _ in list_loosened(policy, last)}
    for key, reason in policy.loosened.items():
        went_out = last.loosened.get(key) == reason and key not in undone
        is_unknown = not knows_material and (key.startswith("reference.") or key.endswith(".cases"))
        if key not in named and not went_out and not is_unknown:
            raise SettingsError(
                f"{_name(policy)}gate.loosened.{key}: expected a setting that is looser than at the "
                "last release, found none of that name that is; remove it"
            )


def _compare_material(
    pinned: Mapping[str, str], material: Mapping[str, str], last: Policy, named: set[str]
) -> Iterator[tuple[str, Value, Value]]:
    """Compare weights and cases, but for those of another reference or evalset: its name has its own reason."""
    names = {f"reference.{part}": {"reference"} for part in ("weights", "serving", "adapter")}
    names |= {f"evals.{n}.cases": {f"evals.{n}.{key}" for key in _CASES} for n in _list_gated(last)}
    for key, own in names.items():
        was = pinned.get(key)
        if was is not None and not own & named and (now := material.get(key, was)) != was:
            yield key, was[:12], now[:12]


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
    yield from _compare_watched(last, now)
    noticed, rate = last.canary.get("target_rate"), now.canary.get("target_rate")
    if noticed is not None and (rate is None or rate > noticed):
        yield "canary.target_rate", noticed, _as_value(rate)
    yield from _compare_benchmarks(last, now)
    yield from _compare_candidates(last, now)


def _compare_benchmarks(last: Policy, now: Policy) -> Iterator[tuple[str, Value, Value]]:
    """Compare how slow a candidate may be, and on what it is timed; times that fail nobody may change."""
    if last.max_slowdown is None:
        return
    if now.max_slowdown is None or now.max_slowdown > last.max_slowdown:
        key = "benchmark.max_slowdown" if last.grid else "max_slowdown"  # a grid of work is what a benchmark times
        yield key, last.max_slowdown, _as_value(now.max_slowdown)
    for key, was in last.grid.items():
        asked = now.grid.get(key, was)
        if any(cell not in asked for cell in was) if isinstance(was, list) else asked < was:
            yield f"benchmark.{key}", _as_value(was), _as_value(asked)


def _compare_candidates(last: Policy, now: Policy) -> Iterator[tuple[str, Value, Value]]:
    """Compare what was asked of single candidates; one of another name in the place of one that is gone inherits it."""
    new = set(now.release) - set(last.release)
    for name in last.release:
        heirs = {name} & set(now.release) or new
        least = last.min_acceptance.get(name)
        for heir in sorted(heirs):
            lower = now.min_acceptance.get(heir)
            if least is not None and (lower is None or lower < least):
                yield f"candidates.{heir}.min_acceptance", least, _as_value(lower)
            if name in last.exact and heir not in now.exact:
                yield f"candidates.{heir}.exact", "true", "false"


def _compare_evals(last: Policy, now: Policy) -> Iterator[tuple[str, Value, Value]]:
    """Compare the settings of the evals that were gated; one that is gone has lost its tolerances, which is seen."""
    for name in _list_gated(last):
        was, settings = last.evals.get(name, {}), now.evals.get(name, {})
        # a key that only one side has came or went with the code or with `kind`
        for key in [key for key in was if key in settings]:
            if settings[key] != was[key]:
                yield f"evals.{name}.{key}", _as_value(was[key]), _as_value(settings[key])


def _list_gated(policy: Policy) -> list[str]:
    return list(dict.fromkeys(metric.rpartition("/")[0] for metric in policy.tolerances))


def _as_value(setting: Any) -> Value:
    """Return a setting as a reason names it: a number, or text."""
    if isinstance(setting, (int, float)) and not isinstance(setting, bool):
        return float(setting)
    return setting if isinstance(setting, str) else _NOT_SET if setting is None else json.dumps(setting)


def _compare_tolerances(
    key: str, last: GatedTolerance, now: GatedTolerance | None
) -> Iterator[tuple[str, Value, Value]]:
    if now is None:
        yield key, "gated", _NOT_SET
        return
    if _TIERS.index(now.tier) < _TIERS.index(last.tier):
        yield f"{key}.tier", last.tier, now.tier
    limits = {"overall": (last.overall, now.overall)}
    limits |= {f"buckets.{name}": (was, now.buckets.get(name)) for name, was in last.buckets.items()}
    for part, (was, allowed) in limits.items():
        if was is not None and (allowed is None or allowed > was):
            yield f"{key}.{part}", was, _as_value(allowed)


def _compare_watched(last: Policy, now: Policy) -> Iterator[tuple[str, Value, Value]]:
    """Compare the categories that got a tolerance of their own, as each was judged by that of AP before.

    Where params.yaml names none, whatever is no area of objects may be one.
    """
    for name in _list_gated(last):
        metric = f"{name}/{WATCHED_METRIC}"
        was, own = last.tolerances.get(metric), now.tolerances.get(metric)
        if was is None or was.overall is None or own is None:  # nothing was watched, or its own reason says that
            continue
        settings = now.evals.get(name, {})
        may_be = settings.get("categories") or ()
        for bucket in sorted(_list_own_buckets(now, name) - _list_own_buckets(last, name)):
            allowed = own.buckets.get(bucket)
            is_category = bucket in may_be if may_be else bucket not in {*AREAS, *settings.get("areas", ())}
            if is_category and (allowed is None or allowed > was.overall):
                yield f"tolerances.{metric}.buckets.{bucket}", was.overall, _as_value(allowed)


def _list_own_buckets(policy: Policy, eval_name: str) -> set[str]:
    """Return the buckets of an eval with a tolerance that can stop a release: these are not watched."""
    return {
        bucket
        for metric, tolerance in policy.tolerances.items()
        if metric.startswith(f"{eval_name}/") and tolerance.tier != "advisory"
        for bucket in tolerance.buckets
    }


def _tell(value: Value) -> str:
    return f"{value:.12g}" if isinstance(value, float) else value


def _name(policy: Policy) -> str:
    return f"products.{policy.product}."
