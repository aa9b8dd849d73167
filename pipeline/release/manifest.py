"""The manifest of a release: what went out and what it rests on, as digests.

All but `git` and `libraries` follows from the other files of the bundle, and `verification` derives it again.
There is no time in it: git has that of the commit, and the same release made again should read the same.
"""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from pipeline.errors import EvidenceError
from pipeline.gate.loosening import digest_serving
from pipeline.gate.verdicts import Judgement, Policy, released_verdicts
from pipeline.products import KINDS
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import Evaluation
from pipeline.records.record_files import Record, read_record
from pipeline.settings.base import Product

PARAMS, VERDICT = "params.yaml", "verdict.json"
_JUDGED_BY = ("numpy", "scipy", "pydantic")  # libraries that the verdict is computed with
# what a run of the pipeline writes and git keeps: changed after every run, and no reason to call the code changed
_WRITTEN = ("dvc.lock", "metrics/", "reports/", "release/")


class GitState(Record):
    """Where the code stood; the commit is the one before the release itself is committed."""

    commit: str
    is_clean: bool  # but for what the pipeline writes
    changed: tuple[str, ...]


class Side(Record):
    """One candidate of a release, or its reference."""

    candidate: str
    outcome: str  # "reference" of the reference
    fingerprint: str
    weights_path: str  # relative to the project when it was released, or a model of a hub
    weights_digest: str
    weights: dict[str, str]  # digest of each file
    draft_digest: str | None
    adapter_digest: str | None
    serving_digest: str | None = None  # of how it is run; None: of a release before it was kept
    records: dict[str, str]  # digest of each file of the evaluation, as it was judged


class KeptEvalset(Record):
    """An evalset that both sides answered."""

    digest: str
    num_cases: int


class Manifest(Record):
    """What a bundle is about (`manifest.json`)."""

    schema_version: Literal[1] = 1
    product: str
    outcome: str
    verdict_sha256: str
    params_sha256: str
    policy: Policy
    reference: Side
    release: tuple[Side, ...]
    evalsets: dict[str, KeptEvalset]
    libraries: dict[str, str]
    git: GitState | None

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, data: Any) -> Any:
        """Take a manifest of before products had names: it said `track`."""
        if not isinstance(data, dict) or "track" not in data:
            return data
        return {"product" if key == "track" else key: value for key, value in data.items()}


def describe_content(bundle: Path, judgement: Judgement, product: Product) -> dict[str, Any]:
    """Return what the manifest says of the files beside it.

    Raises:
        EvidenceError: a record is missing or damaged.
    """
    outcomes = {v.candidate: v.outcome for v in released_verdicts(judgement)}
    reference = read_record(bundle / "evaluations" / product.reference / "evaluation.json", Evaluation)
    return {
        "product": judgement.policy.product,
        "outcome": judgement.outcome,
        "verdict_sha256": digest_file(bundle / VERDICT),
        "params_sha256": digest_file(bundle / PARAMS),
        "policy": judgement.policy,
        "reference": _describe_side(bundle, product.reference, "reference", product),
        "release": tuple(_describe_side(bundle, name, outcome, product) for name, outcome in outcomes.items()),
        "evalsets": {
            name: KeptEvalset(digest=file.evalset_digest, num_cases=file.num_cases)
            for name, file in reference.evals.items()
        },
    }


def _describe_side(bundle: Path, name: str, outcome: str, product: Product) -> Side:
    candidate = KINDS[product.kind].get_auditor().read_candidate(bundle, name, product)
    index = bundle / "evaluations" / name / "evaluation.json"
    evaluation = read_record(index, Evaluation)
    records = {"evaluation.json": digest_file(index)}
    for eval_name, file in evaluation.evals.items():
        records[file.records] = file.sha256
        records |= {f"{eval_name}.npz": file.arrays_sha256} if file.arrays_sha256 else {}
        records |= {f"{eval_name}.json": file.notes_sha256} if file.notes_sha256 else {}
    if evaluation.canary is not None:
        records[evaluation.canary.records] = evaluation.canary.sha256
    drafts = candidate.serving.speculative
    return Side(
        candidate=name,
        outcome=outcome,
        fingerprint=evaluation.fingerprint,
        weights_path=candidate.checkpoint.path,
        weights_digest=candidate.checkpoint.digest,
        weights=candidate.checkpoint.files,
        draft_digest=drafts.draft_digest if drafts else None,
        adapter_digest=candidate.libraries.get("adapter"),
        serving_digest=digest_serving(evaluation.serving),
        records=records,
    )


def read_versions(path: Path) -> dict[str, str]:
    """Return the versions of what evaluated, as the stage env recorded them, and of what judges here.

    Raises:
        EvidenceError: nothing was recorded.
    """
    try:
        recorded = json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise EvidenceError(f"{path}: expected the versions of libraries, found none; run `dvc repro`") from None
    judging = {name: version(name) for name in _JUDGED_BY}
    return dict(sorted({**recorded, **judging, "python": platform.python_version()}.items()))


def read_git(root: Path) -> GitState | None:
    """Return where the code stands; None where it is under no git."""
    commit = _run_git(root, "rev-parse", "HEAD")
    prefix = _run_git(root, "rev-parse", "--show-prefix")  # "" but for a project in a folder of its repository
    status = _run_git(root, "status", "--porcelain=v1", "--no-renames", "-z", ".")
    if commit is None or prefix is None or status is None:
        return None
    paths = [entry[3:].removeprefix(prefix.removesuffix("\n")) for entry in status.split("\0") if entry]
    changed = sorted(path for path in paths if not path.startswith(_WRITTEN))
    return GitState(commit=commit.strip(), is_clean=not changed, changed=tuple(changed))


def _run_git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
