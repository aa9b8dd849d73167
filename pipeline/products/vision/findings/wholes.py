"""Were tiles judged beside the pictures of the reference's evaluation that is judged now?"""

from __future__ import annotations

from pipeline.gate.pairing import Evidence
from pipeline.products.vision.findings.notes import parse_notes
from pipeline.products.vision.wholes import digest_wholes


def check_wholes(evidence: Evidence, reference: Evidence) -> list[str]:
    """Return why a candidate can't be judged beside this reference, of each eval.

    Raises:
        EvidenceError: no notes, or not those of a network.
    """
    problems = []
    for name in evidence.records:
        beside = parse_notes(path := evidence.folder / f"{name}.json").beside
        if beside is None or name not in reference.records:
            continue
        present = digest_wholes(reference.records[name])
        if present != beside:
            problems.append(
                f"{path}: expected tiles judged beside the reference's pictures ({present[:12]}), they were beside "
                f"others ({beside[:12]}); run `dvc repro -f -s evaluate@{evidence.candidate.name}`"
            )
    return problems
