"""The judgement on a release, and what it means for the exit code.

`compare` writes a Judgement to reports/verdict.json whatever it says; the stage `gate` reads it
back, prints what blocks, and writes the marker `build/gate.ok` only on a pass. Nothing is computed
here and numpy is never imported, so the gate answers at once and on a machine without any weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.digests import canonical_json, digest_file
from pipeline.errors import EvidenceError
from pipeline.gate.wording import format_harm, format_p, format_range, format_tolerance, format_value, name_comparison
from pipeline.records import Candidate, Comparison, Metric, Record, Verdict, read_record, write_text

VERDICT_PATH = Path("reports/verdict.json")
REPORT_PATH = Path("reports/report.md")
REFUSED = "refused: "  # starts each of a verdict's reasons that names unfit evidence


class GatedTolerance(Record):
    """The tolerance of one metric, as it was set when the judgement was made."""

    overall: float | None
    buckets: dict[str, float]


class Judgement(Record):
    """All verdicts of one comparison and the settings they rest on (`reports/verdict.json`)."""

    reference: str
    reference_fingerprint: str
    reference_metrics: tuple[Metric, ...]
    release: tuple[str, ...]
    alpha: float
    on_inconclusive: Literal["block", "warn"]
    tolerances: dict[str, GatedTolerance]
    tripwires: dict[str, float]
    eval_kinds: dict[str, str]
    verdicts: tuple[Verdict, ...]


def released_verdicts(judgement: Judgement) -> list[Verdict]:
    """Return the verdicts that decide.

    Raises:
        EvidenceError: a released candidate has no verdict.
    """
    by_name = {verdict.candidate: verdict for verdict in judgement.verdicts}
    for name in judgement.release:
        if name not in by_name:
            raise EvidenceError(f"{VERDICT_PATH}: release names {name!r}, but there is no verdict on it; "
                                "run `dvc repro compare`")
    return [by_name[name] for name in judgement.release]


def list_refusals(verdict: Verdict) -> list[str]:
    """Return why evidence was refused, one line each."""
    return [reason.removeprefix(REFUSED) for reason in verdict.reasons if reason.startswith(REFUSED)]


def is_blocking(verdict: Verdict, judgement: Judgement) -> bool:
    """Say whether a verdict keeps the release from going out."""
    if verdict.outcome == "inconclusive":
        return judgement.on_inconclusive == "block"
    return verdict.outcome != "pass"


def check_fingerprints(judgement: Judgement, build: Path) -> None:
    """Check that what was judged is what would ship, where the candidates are present.

    A fresh clone without build/ has nothing to compare with and passes; an attached endpoint
    has its own fingerprint, which candidate.json can't know.

    Raises:
        EvidenceError: a candidate was rebuilt, its serving changed, or it is gone since it was judged.
    """
    if not (build / "candidates").is_dir():
        return
    for verdict in released_verdicts(judgement):
        path = build / "candidates" / verdict.candidate / "candidate.json"
        if verdict.outcome == "refused":
            continue
        if not path.is_file():
            raise EvidenceError(f"{path}: expected the candidate that was judged ({verdict.fingerprint[:12]}), found "
                                "none: making it again has failed; run `dvc repro`")
        candidate = read_record(path, Candidate)
        if candidate.serving.engine != "attached" and candidate.fingerprint != verdict.fingerprint:
            raise EvidenceError(f"{path}: expected the candidate that was judged ({verdict.fingerprint[:12]}), found "
                                f"{candidate.fingerprint[:12]}; run `dvc repro` so that it is evaluated again")


def write_marker(path: Path, judgement: Judgement, *, verdict_path: Path) -> None:
    """Write the proof of a pass: the digest of the judgement and the fingerprints it covers."""
    fingerprints = {verdict.candidate: verdict.fingerprint for verdict in released_verdicts(judgement)}
    write_text(path, canonical_json({"verdict_sha256": digest_file(verdict_path), "release": fingerprints}) + "\n")


def render_gate(judgement: Judgement) -> str:
    """Write what a person at the terminal needs: a table, and for each block why and where to look."""
    verdicts = released_verdicts(judgement)
    width = max(len("release"), *(len(v.candidate) for v in verdicts))
    lines = [f"{'release':<{width}}  {'verdict':<12}  gated  fail  inconclusive  refused"]
    lines += [_row(verdict, width) for verdict in verdicts]
    for verdict in verdicts:
        if verdict.outcome != "pass":
            lines += _why(verdict, is_blocking(verdict, judgement))
    if any(is_blocking(verdict, judgement) for verdict in verdicts):
        lines += ["", "look closer:", f"  {REPORT_PATH}      every comparison, the plots and the worst flips",
                  "  dvc metrics diff        numbers against the last commit",
                  "  make ui                 MLflow: predictions side by side"]
    return "\n".join(lines)


def _row(verdict: Verdict, width: int) -> str:
    outcomes = [c.outcome for c in verdict.comparisons if c.outcome != "reported"]
    num_refused = len(list_refusals(verdict))
    return (f"{verdict.candidate:<{width}}  {verdict.outcome.upper():<12}  {len(outcomes):>5}  "
            f"{outcomes.count('fail'):>4}  {outcomes.count('inconclusive'):>12}  {num_refused:>7}")


def _why(verdict: Verdict, blocks: bool) -> list[str]:
    effect = "blocks the release" if blocks else "does not block: gate.on_inconclusive is warn"
    lines = ["", f"{verdict.candidate}: {verdict.outcome}, {effect}"]
    lines += [f"  {reason}" for reason in verdict.reasons if reason.startswith("perplexity flat")]
    lines += [f"  {'refused':<12} {problem}" for problem in list_refusals(verdict)]
    shown = [c for outcome in ("fail", "inconclusive") for c in verdict.comparisons if c.outcome == outcome]
    for comparison in shown:
        lines += describe(comparison)
    return lines


def describe(comparison: Comparison) -> list[str]:
    """Write one comparison in three lines: name, numbers, sentence."""
    c = comparison
    flips = f"b {c.b}, c {c.c} of n {c.n}" if c.b is not None else f"n {c.n}"
    tolerance = format_tolerance(c.metric, c.tolerance) if c.tolerance is not None else "none"
    return [
        f"  {c.outcome:<12} {name_comparison(c)}",
        f"      {format_value(c.metric, c.reference)} -> {format_value(c.metric, c.candidate)}; {flips}; "
        f"harm {format_harm(c.metric, c.harm)} ({format_range(c.metric, c.low, c.high)}), tolerance {tolerance}, "
        f"p {format_p(c.p_holm)}",
        f"      {c.sentence}",
    ]
