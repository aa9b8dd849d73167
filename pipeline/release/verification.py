"""Check a bundle without the weights: is it whole, is it signed, and does its verdict still follow from its scores?

The verdict is computed again by the gate's own code from the kept scores under the kept settings, and every number
that decides is compared. Numbers may differ by rounding, as another version of a library sums in another order. The
manifest and the model cards must be what the verdict gives. What
decides nothing is not compared: tripwires and notes, which need the texts.

Without a public key this finds accidents and careless edits. Whoever edits scores, verdict, manifest and sums alike is
found by the signature alone.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import QuantgateError
from pipeline.gate.checks import check_outcomes, find_other_policy
from pipeline.gate.compare import compare_release
from pipeline.gate.loosening import MANIFEST
from pipeline.gate.verdicts import Judgement, released_verdicts
from pipeline.gate.wording import definition_of, use_metrics
from pipeline.products import KINDS
from pipeline.records.checksums import find_changes, find_links
from pipeline.records.digests import digest_files, digest_json, name_changed_file
from pipeline.records.record_files import read_record
from pipeline.records.verdicts import Verdict
from pipeline.release.kept_records import restore_records
from pipeline.release.manifest import PARAMS, VERDICT, Manifest, describe_content
from pipeline.release.model_card import CARDS, render_cards
from pipeline.release.settings import load_released
from pipeline.release.signature import SIGNATURE, find_forgery
from pipeline.settings.base import Product

_ROUNDING = 1e-9  # relative; what another order of summing may change
_ABSENT = "nothing"
_MAX_SHOWN = 100  # characters of a value


@dataclass
class Verification:
    """What was found: a bundle is sound when there are no problems."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was checked, and what was not


def verify_bundle(
    bundle: Path, *, public_key: Path | None = None, weights: Mapping[str, Path] | None = None
) -> Verification:
    """Check a bundle.

    Args:
        bundle: its folder.
        public_key: of who must have signed it; None: a signature is not checked.
        weights: folders of weights to compare with what was released, by candidate.

    Raises:
        SettingsError: the key can't be read.
    """
    if links := find_links(bundle):
        return Verification(problems=links)  # whatever they lead to would be read, and copied, to judge again
    done = Verification(problems=find_changes(bundle))
    _check_signature(bundle, public_key, done)
    try:
        manifest = read_record(bundle / MANIFEST, Manifest)
        judgement = read_record(bundle / VERDICT, Judgement)
        product = load_released(bundle / PARAMS, manifest.product)
        with use_metrics(product.metrics):
            _check_content(bundle, manifest, judgement, product, done)
        names = ", ".join(f"{side.candidate} {side.outcome}" for side in manifest.release)
        done.notes.append(
            f"{manifest.product}: {names}; judged again from the scores of {len(manifest.evalsets)} evals"
        )
        for name, folder in (weights or {}).items():
            _check_weights(manifest, name, folder, done)
        if not weights:
            done.notes.append("the weights were not looked at")
    except (QuantgateError, OSError, KeyError, MemoryError) as error:
        done.problems.append(f"{bundle}: can't be judged again: {error}")
    return done


def _check_content(
    bundle: Path, manifest: Manifest, judgement: Judgement, product: Product, done: Verification
) -> None:
    """Add what the verdict, the manifest and the cards say that does not follow from what is beside them."""
    if difference := find_other_policy(judgement, product):
        done.problems.append(f"{bundle / PARAMS}: the verdict beside it was reached with {difference}")
    check_outcomes(judgement)
    done.problems += _check_manifest(bundle, manifest, describe_content(bundle, judgement, product))
    done.problems += _check_cards(bundle, judgement)
    done.problems += _judge_again(bundle, judgement, product)


def _check_signature(bundle: Path, public_key: Path | None, done: Verification) -> None:
    if public_key is not None:
        if forgery := find_forgery(bundle, public_key):
            done.problems.append(forgery)
        else:
            done.notes.append(f"signed by the owner of {public_key}")
    elif (bundle / SIGNATURE).is_file():
        done.notes.append("signed; the signature was not checked, as no public key is given")
    else:
        done.notes.append("not signed")


def _check_manifest(bundle: Path, manifest: Manifest, content: dict[str, Any]) -> list[str]:
    said = manifest.model_dump(mode="json", exclude={"libraries", "git", "schema_version"})
    found = Manifest(**content, libraries={}, git=None).model_dump(mode="json", include=set(said))
    return [
        f"{bundle / MANIFEST}: {where}: says {show_kept(was)}, the bundle has {show_kept(now)}"
        for where, was, now in find_differences(said, found)
    ]


def _check_cards(bundle: Path, judgement: Judgement) -> list[str]:
    """Return each card that is not what the verdict gives; line ends and bytes that are no text count."""
    folder, said = bundle / CARDS, {name: card.encode() for name, card in render_cards(judgement).items()}
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [
        f"{folder / name}: expected the card that {VERDICT} gives, found "
        + ("none" if name not in found else "another" if name in said else "one of what was not released")
        for name in sorted(said | found)
        if said.get(name) != found.get(name)
    ]


def _judge_again(bundle: Path, judgement: Judgement, product: Product) -> list[str]:
    """Compute the verdict on what was released from the kept scores; return what comes out otherwise."""
    with tempfile.TemporaryDirectory(prefix="quantgate-verify-") as folder:
        build = Path(folder, "build")
        restore_records(bundle, build)
        again = compare_release(_restrict(product), KINDS[product.kind].get_auditor(), build).judgement
    differences = find_differences(_decisive(judgement), _decisive(again))
    return [
        f"{bundle / VERDICT}: {where}: says {show_kept(was)}, the scores give {show_kept(now)}"
        for where, was, now in differences
    ]


def show_kept(value: Any) -> str:
    """Return a value of a bundle as Python writes it, cut to what a line has room for."""
    return shown if len(shown := repr(value)) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 3]}..."


def _restrict(product: Product) -> Product:
    """Return the settings with only what a bundle holds: the reference and the released candidates."""
    return product.restrict({product.reference, *product.release})


def _decisive(judgement: Judgement) -> dict[str, Any]:
    """Return what decides of a judgement, by names that read well."""
    return {
        "outcome": judgement.outcome,
        "reference_fingerprint": judgement.reference_fingerprint,
        "reference_metrics": _by_name([m.model_dump(mode="json") for m in judgement.reference_metrics], "name"),
        "verdicts": {v.candidate: _decisive_verdict(v) for v in released_verdicts(judgement)},
    }


def _decisive_verdict(judged: Verdict) -> dict[str, Any]:
    verdict = judged.model_dump(mode="json")
    parts = {
        "outcome": verdict["outcome"],  # what matters most comes first
        "reasons": {str(reason): "given" for reason in judged.reasons if not reason.kind.is_note},
        "comparisons": _by_name(verdict["comparisons"], "metric"),
        "metrics": _by_name(verdict["metrics"], "name"),
    }
    ignored = {*parts, "seconds"}  # how the time was shared follows from latencies, which are not kept
    return parts | {key: value for key, value in verdict.items() if key not in ignored}


def _by_name(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    return {
        row[key] + (f" [{row['bucket']}]" if row["bucket"] else ""): row
        for row in rows
        if definition_of(row[key]).is_gated
    }


def find_differences(was: Any, now: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted path, first, second) of each value in which two trees of JSON differ by more than rounding."""
    if isinstance(was, dict) and isinstance(now, dict):
        sides = {f"{where}.{key}".strip("."): (was.get(key, _ABSENT), now.get(key, _ABSENT)) for key in was | now}
        return [found for place, (a, b) in sides.items() for found in find_differences(a, b, place)]
    if isinstance(was, (list, tuple)) and isinstance(now, (list, tuple)) and len(was) == len(now):
        pairs = enumerate(zip(was, now, strict=True))
        return [found for i, (a, b) in pairs for found in find_differences(a, b, f"{where}.{i}")]
    if isinstance(was, float) and isinstance(now, float) and math.isclose(was, now, rel_tol=_ROUNDING, abs_tol=1e-12):
        return []
    return [] if was == now else [(where, was, now)]


def _check_weights(manifest: Manifest, name: str, folder: Path, done: Verification) -> None:
    side = next((side for side in manifest.release if side.candidate == name), None)
    if side is None:
        names = ", ".join(s.candidate for s in manifest.release)
        done.problems.append(f"{folder}: expected weights of a released candidate ({names}), got {name!r}")
    elif not folder.is_dir():
        done.problems.append(
            f"{folder}: expected the folder with the weights of {name}, found none; they were in {side.weights_path}"
        )
    elif digest_json(found := digest_files(folder)) == side.weights_digest:
        done.notes.append(f"{folder}: the weights of {name}, as released")
    else:
        done.problems.append(
            f"{folder}: expected the weights of {name} ({side.weights_digest[:12]}), found others "
            f"({digest_json(found)[:12]}: {name_changed_file(side.weights, found)})"
        )
