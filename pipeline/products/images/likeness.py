"""Compare each candidate's pictures with the reference's of the same prompt and seed, and write how alike they are.

A candidate's evaluation does not see the reference, and the gate has neither torch nor the time to open thousands of
pictures: so they are compared in between, by the stage `benchmark`, when both evaluations are there. Pictures with
equal digests are equal and stay closed. One that is not sound is a miss: 0. What can't be compared is refused by name,
and that candidate alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import EvidenceError, NumericsError
from pipeline.gate.pairing import Evidence, load_evidence, pair_cases
from pipeline.products.images.findings.likeness import FOLDER, locate_likeness
from pipeline.products.images.scoring import compare_pictures
from pipeline.products.images.serving import read_image_candidate
from pipeline.products.images.settings import ImagesProduct
from pipeline.records.digests import digest_file, digest_json
from pipeline.records.evaluations import CaseRecord
from pipeline.records.kept_outputs import name_picture
from pipeline.records.likeness import Likeness, PictureLikeness
from pipeline.records.record_files import read_record, write_record
from pipeline.report.pictures.images import Picture, locate_image, read_image
from pipeline.running.stage_code import digest_code

Pair = tuple[CaseRecord, CaseRecord]  # of the reference and of the candidate


def measure_likeness(product: ImagesProduct, build: Path) -> list[str]:
    """Write `benchmarks/<candidate>.json` for each candidate under `build`, and remove those of others.

    One that was compared just so before is taken over.

    Args:
        product: whose candidates.
        build: folder of the product's results.

    Returns:
        A line on each candidate.
    """
    names = [name for name in product.candidates if name != product.reference]
    for path in (build / FOLDER).glob("*.json"):
        if path.stem not in names:
            path.unlink()
    return [_update(name, product, build) for name in names]


def _update(name: str, product: ImagesProduct, build: Path) -> str:
    path, key = locate_likeness(build, name), _digest_work(name, product, build)
    likeness, how = _read(path), "taken over"
    if likeness is None or likeness.key != key or likeness.refusal:  # its cause may be gone
        likeness, how = _measure(name, product, build, key), "compared with the reference's"
        write_record(path, likeness)
    if likeness.refusal:
        return f"{name}: refused: {likeness.refusal}"
    return f"{name}: {sum(map(len, likeness.evals.values()))} pictures {how}"


def _read(path: Path) -> Likeness | None:
    try:
        return read_record(path, Likeness)
    except EvidenceError:
        return None


def _digest_work(name: str, product: ImagesProduct, build: Path) -> str:
    """Return the digest of what is compared: both sides as they were evaluated, and the code."""
    indexes = [build / "evaluations" / side / "evaluation.json" for side in (product.reference, name)]
    return digest_json(
        [digest_code("benchmark", "images"), *(digest_file(path) if path.is_file() else "" for path in indexes)]
    )


def _measure(name: str, product: ImagesProduct, build: Path, key: str) -> Likeness:
    try:
        sides = _load(product.reference, product, build), _load(name, product, build)
        evals = {eval_name: tuple(_compare_eval(sides, eval_name)) for eval_name in product.evals}
    except (EvidenceError, NumericsError) as error:
        return Likeness(name=name, key=key, refusal=str(error))
    return Likeness(name=name, key=key, evals=evals)


def _load(name: str, product: ImagesProduct, build: Path) -> Evidence:
    evidence = load_evidence(build, read_image_candidate(build, name, product), product.evals)
    for problem in evidence.problems.values():
        raise EvidenceError(problem)
    return evidence


def _compare_eval(sides: tuple[Evidence, Evidence], eval_name: str) -> Iterator[PictureLikeness]:
    """Yield how alike the pictures of each case are, in the reference's order."""
    pairs = pair_cases(*sides, eval_name)
    for first, second in zip(pairs.reference, pairs.candidate, strict=True):
        if not (first.scores.get("sound") and second.scores.get("sound")):
            ssim = 0.0
        elif first.output == second.output:
            ssim = 1.0
        else:
            ssim = compare_pictures(*_read_pair(sides, eval_name, (first, second)))
        yield PictureLikeness(
            case_id=first.case_id,
            reference=name_picture(first.output),
            candidate=name_picture(second.output),
            ssim=ssim,
        )


def _read_pair(sides: Sequence[Evidence], eval_name: str, pair: Pair) -> tuple[Picture, Picture]:
    """Return the pictures of a case.

    Raises:
        EvidenceError: one is missing, broken, not the one that was judged, or of another size.
    """
    images = [locate_image(side.folder, eval_name, record) for side, record in zip(sides, pair, strict=True)]
    ours, theirs = map(read_image, images)
    if ours.shape != theirs.shape:
        raise EvidenceError(
            f"{images[1].path}: expected {ours.shape[1]} x {ours.shape[0]} pixels, as in {images[0].path}, got "
            f"{theirs.shape[1]} x {theirs.shape[0]}; pictures of two sizes can't be compared: draw both alike"
        )
    return ours, theirs
