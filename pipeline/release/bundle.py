"""Write the bundle of a release that passed: a folder that git keeps and anybody can check without the weights.

    manifest.json          what went out and what it rests on, as digests
    params.yaml            the settings, as they were
    verdict.json           the verdict, byte for byte
    candidates/ evaluations/ benchmarks/    what is needed to judge again
    cards/NAME.md          a model card for each released candidate
    model.sig              a signature, where there is a key
    SHA256SUMS             the digest of every file above

Only a release that the gate let through gets one, and only of the very judgement that the gate saw.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.gate.checks import check_outcomes, check_policy
from pipeline.gate.loosening import MANIFEST
from pipeline.gate.verdicts import Judgement, blocking_verdicts
from pipeline.records.checksums import write_sums
from pipeline.records.digests import digest_file
from pipeline.records.files import replace_folder, write_text
from pipeline.records.record_files import write_record
from pipeline.release.kept_records import keep_records
from pipeline.release.manifest import PARAMS, VERDICT, Manifest, describe_content, read_git, read_versions
from pipeline.release.model_card import CARDS, render_cards
from pipeline.release.signature import sign
from pipeline.release.verification import verify_bundle
from pipeline.settings.base import Product


def check_marker(marker: Path, judgement: Judgement, verdict_path: Path) -> None:
    """Check that the gate let this very judgement through.

    Args:
        marker: what the gate writes on a pass.
        judgement: on the release.
        verdict_path: the file that it was read from.

    Raises:
        EvidenceError: there is no marker, or it is of another judgement, or the judgement blocks.
    """
    remedy = "run `dvc repro`"
    try:
        seen = json.loads(marker.read_bytes())["verdict_sha256"]
    except FileNotFoundError:
        raise EvidenceError(f"{marker}: expected the gate's marker of a pass, found none; {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise EvidenceError(f"{marker}: expected the gate's marker of a pass, found other content; {remedy}") from None
    if seen != (found := digest_file(verdict_path)):
        raise EvidenceError(
            f"{verdict_path}: the gate passed another verdict ({str(seen)[:12]}) than this one ({found[:12]}); {remedy}"
        )
    check_outcomes(judgement)
    if blocking := blocking_verdicts(judgement):
        raise EvidenceError(f"{verdict_path}: {blocking[0].candidate} is {blocking[0].outcome}, which blocks; {remedy}")


def write_bundle(
    product: Product,
    judgement: Judgement,
    *,
    build: Path,
    params: Path,
    verdict: Path,
    bundle: Path,
    libraries: Path,
    private_key: Path | None,
) -> Manifest:
    """Write a release's bundle in place of an earlier one, which stays where the new one does not verify.

    Args:
        product: settings.
        judgement: which passed.
        build: folder of the product's results.
        params: the settings file.
        verdict: the judgement's file.
        bundle: where to write.
        libraries: the file with the versions of what evaluated.
        private_key: to sign with; None: the bundle is not signed.

    Raises:
        EvidenceError: a record is missing, the judgement is not of these settings or does not follow from the records.
        SettingsError: the key is none.
    """
    check_policy(judgement, product)
    bundle.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=bundle.parent, prefix=".") as folder:
        new = Path(folder, bundle.name)
        keep_records(build, [product.reference, *product.release], new)
        shutil.copyfile(params, new / PARAMS)
        shutil.copyfile(verdict, new / VERDICT)
        manifest = Manifest(
            **describe_content(new, judgement, product), libraries=read_versions(libraries), git=read_git(params.parent)
        )
        write_record(new / MANIFEST, manifest)
        for name, card in render_cards(judgement).items():
            write_text(new / CARDS / name, card)
        if private_key is not None:
            sign(new, private_key)
        write_sums(new)
        if problems := verify_bundle(new).problems:
            raise EvidenceError(f"the bundle that was just written does not verify: {problems[0]}")
        replace_folder(new, bundle)
    return manifest
