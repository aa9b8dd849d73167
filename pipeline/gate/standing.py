"""Does a written judgement still stand? Read it, and check it against params.yaml, the last release and the weights.

What the stage `gate` and the command `quantgate gate` both rest on; nothing is judged anew.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.gate.audits import Auditor, P
from pipeline.gate.checks import check_candidates, check_outcomes, check_policy
from pipeline.gate.loosening import check_loosening, digest_serving, name_material
from pipeline.gate.verdicts import VERDICT_FILE, Judgement
from pipeline.records.evaluations import Evaluation
from pipeline.records.record_files import read_record
from pipeline.settings.base import Product


def read_judgement(product: P, kind: Auditor[P], root: Path) -> tuple[Judgement, bool]:
    """Read a product's judgement and check that it is about what would ship, under the present params.yaml.

    Returns:
        The judgement, and whether the candidates are here to be checked.

    Raises:
        EvidenceError: there is none, it was edited, or it is about something else.
        SettingsError: a setting is looser than at the last release, or what candidates are judged by is another,
            without a reason.
    """
    judgement = read_record(root / product.reports / VERDICT_FILE, Judgement)
    check_policy(judgement, product)
    check_loosening(judgement.policy, root, material=_read_material(product, root))
    check_outcomes(judgement)
    return judgement, check_candidates(judgement, product, kind, root)


def _read_material(product: Product, root: Path) -> dict[str, str]:
    """Return what the reference was evaluated with; nothing in a clone without its evaluation."""
    path = root / product.build / "evaluations" / product.reference / "evaluation.json"
    if not path.is_file():
        return {}
    evaluation = read_record(path, Evaluation)
    return name_material(
        weights=evaluation.checkpoint_digest,
        serving=digest_serving(evaluation.serving),
        cases={name: file.evalset_digest for name, file in evaluation.evals.items()},
        adapter=evaluation.served_by.get("libraries", {}).get("adapter"),
    )
