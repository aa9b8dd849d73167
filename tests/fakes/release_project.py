"""A small project whose release passes, as the stages before `release` leave it: for tests of the bundle.

It has no weights but a text file and no model, and stages only after `write_stages`. Every test gets a copy of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from ruamel.yaml import YAML

from pipeline.gate.verdicts import Judgement, write_marker
from pipeline.products.params import get_product, load_params
from pipeline.products.text.settings import TextProduct
from pipeline.records.files import write_text
from pipeline.records.record_files import write_record
from pipeline.release.bundle import write_bundle
from tests.fakes.judging import compare_release
from tests.fakes.synthetic_records import PRODUCT, Behaviour, describe_project, make_params, write_tree
from tests.paths import ROOT

NAME = "good"
# few cases prove little: wide enough that a candidate which loses one case in a hundred passes
TOLERANCES = {
    "workflows/task_completion_rate": {"overall": 0.15},
    "calls/tool_call_exact_match": {"overall": 0.15},
    "choices/accuracy": {"overall": 0.15},
    "prose/perplexity_per_token": {"overall": 0.02},
}
BUILD = Path("build", PRODUCT)
VERDICT = Path("reports", PRODUCT, "verdict.json")
BUNDLE = Path("release", PRODUCT)
JUDGING = ("compare", "gate", "release")
_EVALUATED = [f"{BUILD}/candidates", f"{BUILD}/evaluations"]


def write_project(root: Path, *, num_cases: int = 80, loss: float = 0.01) -> TextProduct:
    """Write settings, records and the verdict on one candidate; the marker of the gate where it passes."""
    params = make_params([NAME], [NAME], tolerances=TOLERANCES, on_inconclusive="block")
    # JSON is YAML, and settings that are absent are the defaults
    write_text(root / "params.yaml", json.dumps(describe_project(params)))
    write_text(root / "build/env/libraries.json", '{"torch": "2.13.0"}')
    write_tree(root / BUILD, {NAME: Behaviour({"workflows": loss})}, num_cases=num_cases)
    return judge_project(root)


def judge_project(root: Path) -> TextProduct:
    """Judge what lies in a project, as the stages `compare` and `gate` do."""
    product = load_product(root)
    judgement = compare_release(product, root / BUILD).judgement
    write_record(root / VERDICT, judgement)
    if judgement.outcome == "pass":
        write_marker(root / BUILD / "gate.ok", judgement, verdict_path=root / VERDICT)
    return product


def load_product(root: Path) -> TextProduct:
    """Read the settings of the one product."""
    return get_product(load_params(root / "params.yaml"), PRODUCT, kind=TextProduct)


def bundle_project(root: Path, *, private_key: Path | None = None) -> Path:
    """Write the bundle of a project and return its folder."""
    judgement = Judgement.model_validate_json((root / VERDICT).read_bytes())
    write_bundle(
        load_product(root),
        judgement,
        build=root / BUILD,
        params=root / "params.yaml",
        verdict=root / VERDICT,
        bundle=root / BUNDLE,
        libraries=root / "build/env/libraries.json",
        private_key=private_key,
    )
    return root / BUNDLE


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Make an elliptic-curve key pair and return the files of its private and public half."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def write_stages(root: Path) -> None:
    """Write a dvc.yaml whose judging stages are the repository's own, and what its other stages read."""
    known = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    write_text(root / "cases.txt", "1")
    write_text(root / "inputs.json", json.dumps({stage: {PRODUCT: {"code": "1"}} for stage in JUDGING}))
    stages = {
        "env": {
            "cmd": "mkdir -p build/env && cp inputs.json build/env && "
            'echo \'{"torch": "2.13.0"}\' > build/env/libraries.json',
            "outs": ["build/env/libraries.json", "build/env/inputs.json"],
            "always_changed": True,
        },
        "evaluate": {
            "cmd": f"test -d {BUILD}/evaluations && test -d {BUILD}/candidates",
            "deps": ["cases.txt"],
            "outs": [{place: {"persist": True}} for place in _EVALUATED],
        },
    } | {stage: _take_stage(known[stage]) for stage in JUDGING}
    write_text(root / "dvc.yaml", json.dumps({"stages": stages}))


def _take_stage(stage: dict[str, Any]) -> dict[str, Any]:
    """Return a stage without what no stage makes here."""
    unmade = ("build/${key}/benchmarks", "build/${key}/tracked.txt")
    made = [entry for entry in stage["do"]["deps"] if entry not in unmade]
    return stage | {"do": stage["do"] | {"deps": made}}
