"""Render every setting of a sweep on the same prompts and seeds, by the way of any other image candidate.

A setting that was finished is kept while it is still what would be rendered now: the same weights, serving config,
libraries, environment, hardware, prompts and code. One that was killed goes on at its next batch. The copy of the
pipeline that a candidate has is removed once it is rendered: forty of them would say the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import EvidenceError, SettingsError
from pipeline.evalsets.cards import CARD_FILE, CASES_FILE, compute_seal, load_evalset
from pipeline.products.images.candidate import build_image_candidate
from pipeline.products.images.evaluate import digest_judges, digest_work, evaluate_images
from pipeline.products.images.settings import ImagesProduct
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import Evaluation, ImageCandidate
from pipeline.records.files import write_text
from pipeline.records.fingerprints import find_difference
from pipeline.records.record_files import read_record, write_cases
from pipeline.running.environment import read_machine_facts


def take_prompts(evalset: Path, num_prompts: int, target: Path) -> None:
    """Write some prompts of an evalset as an evalset: those of the smallest digests, so that more hold the fewer.

    Raises:
        SettingsError: there are not as many.
        EvalsetError: the evalset is malformed.
    """
    whole = load_evalset(evalset)
    if not 1 <= num_prompts <= len(whole.cases):
        raise SettingsError(f"--prompts: expected 1 to {len(whole.cases)}, the prompts of {evalset}, got {num_prompts}")
    chosen = {case.digest for case in sorted(whole.cases, key=lambda case: case.digest)[:num_prompts]}
    cases = [case for case in whole.cases if case.digest in chosen]
    write_cases(target / CASES_FILE, cases)
    card = whole.card.model_dump(mode="json") | compute_seal(target / CASES_FILE, cases).model_dump(mode="json")
    write_text(target / CARD_FILE, json.dumps(card, indent=1) + "\n")  # JSON is YAML


def render_settings(
    product: ImagesProduct, *, root: Path, build: Path, say: Callable[[str], None] = print
) -> list[str]:
    """Render each candidate of a sweep's product that is not finished, and return the names of these.

    Args:
        product: of `make_sweep_product`.
        root: project root.
        build: folder of the sweep's results, inside `root`.
        say: takes a line about each setting.

    Raises:
        CheckpointError: a pipeline or the CLIP can't be loaded.
        EngineError: the pipeline refused a prompt, or a worker died.
        SettingsError: the reference's scheduler knows no thresholding.
    """
    rendered = []
    for i, name in enumerate(product.candidates, start=1):
        candidate = build_image_candidate(name, product, root=root, build=build)
        if _is_finished(candidate, product, root=root, build=build):
            say(f"{i}/{len(product.candidates)} {name}: kept")
        else:
            say(f"{i}/{len(product.candidates)} {name}")
            evaluate_images(candidate, product, root=root, build=build)
            rendered.append(name)
    return rendered


def _is_finished(candidate: ImageCandidate, product: ImagesProduct, *, root: Path, build: Path) -> bool:
    folder = build / "evaluations" / candidate.name
    try:
        evaluation = read_record(folder / "evaluation.json", Evaluation)
    except EvidenceError:
        return False
    if find_difference(candidate.facts | read_machine_facts(), evaluation.served_by) is not None:
        return False
    for name, settings in product.evals.items():
        file = evaluation.evals.get(name)
        if file is None or file.key != digest_work(
            settings, load_evalset(root / settings.evalset), digest_judges(product, settings, root)
        ):
            return False
        for path, sealed in ((file.records, file.sha256), (f"{name}.json", file.notes_sha256)):
            if not (folder / path).is_file() or digest_file(folder / path) != sealed:
                return False
    return True
