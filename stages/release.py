"""Stage release: write the bundle of a release that passed, and register what went out in MLflow.

Runs behind the gate, whose marker it depends on. A path to a private key in QUANTGATE_SIGNING_KEY signs the bundle.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.evalsets.examples import check_own_cases
from pipeline.gate.loosening import MANIFEST
from pipeline.gate.verdicts import VERDICT_FILE, Judgement
from pipeline.gate.wording import use_metrics
from pipeline.products.params import get_product, load_params
from pipeline.records.digests import digest_file
from pipeline.records.record_files import read_record
from pipeline.release.bundle import check_marker, write_bundle
from pipeline.release.manifest import PARAMS
from pipeline.report.mlflow_runs.model_registry import ReleasedVersion, register_versions
from pipeline.settings.base import ENV, RELEASE, Product
from stages.cli import read_name, run_stage

KEY = "QUANTGATE_SIGNING_KEY"


def main(argv: list[str]) -> int:
    """Write and register the release of the product named on the command line."""
    product = get_product(load_params(), read_name(argv, "product"), kind=Product)
    check_own_cases(product, Path())
    bundle, verdict = RELEASE / product.name, product.reports / VERDICT_FILE
    judgement = read_record(verdict, Judgement)
    check_marker(product.build / "gate.ok", judgement, verdict)
    key = os.environ.get(KEY)
    with use_metrics(product.metrics):
        manifest = write_bundle(
            product,
            judgement,
            build=product.build,
            params=Path(PARAMS),
            verdict=verdict,
            bundle=bundle,
            libraries=ENV / "libraries.json",
            private_key=Path(key) if key else None,
        )
    print(f"{bundle}: {'signed' if key else f'not signed, as {KEY} names no private key'}")
    if not os.environ.get("DVC_EXP_NAME"):  # what an experiment tries out is not released
        same = {"verdict_sha256": manifest.verdict_sha256, "manifest_sha256": digest_file(bundle / MANIFEST)}
        versions = [
            ReleasedVersion(s.candidate, Path(s.weights_path), same | {"gate": s.outcome, "fingerprint": s.fingerprint})
            for s in manifest.release
        ]
        for registered in register_versions(versions, Path(os.environ.get("DVC_ROOT", ".")), product=product.name):
            print(f"MLflow: {registered}")
    return 0


if __name__ == "__main__":
    run_stage("release", main, is_short=True)
