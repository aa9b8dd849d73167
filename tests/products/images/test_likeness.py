"""Likeness to the reference's pictures: equal ones are exactly 1, a loss is judged on both sides of its tolerance."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import stats

from pipeline.evalsets.cases import PromptCase
from pipeline.gate.compare import ReleaseComparison
from pipeline.numerics.similarity import structural_similarity
from pipeline.products.images.likeness import measure_likeness
from pipeline.products.images.other_seeds import MAX_PROMPTS, choose_other_seeds, measure_floor
from pipeline.products.images.scoring import compare_pictures
from pipeline.products.images.settings import ImagesProduct
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import CaseRecord, read_cases
from pipeline.records.likeness import Likeness
from pipeline.records.record_files import read_record, write_cases
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.release.kept_records import keep_records, restore_records
from pipeline.report.pictures.worst import list_worst_images
from pipeline.settings.base import Tier, Tolerance
from tests.fakes.judging import build_runs, compare_release, list_said, render_report
from tests.fakes.synthetic_images import NUM_CASES, Look, make_image_product, write_image_tree

METRIC = "shots/reference_ssim"
SIDE = 24
LOOKS = {"changed": Look(), "fine": Look()}
Picture = NDArray[np.uint8]


def draw(i: int) -> Picture:
    """Return the reference's picture of a case: a ramp with a square of its own."""
    picture = np.tile(np.linspace(40, 200, SIDE, dtype=np.uint8)[:, None, None], (1, SIDE, 3))
    picture[3 : 9 + i % 5, 4:12] = 20 + 5 * i % 200
    return picture


def draw_noisy(i: int) -> Picture:
    """Return the picture of a candidate that lost a little in every case, most in case 7."""
    noise = np.random.default_rng(i).normal(0, 40 if i == 7 else 4, (SIDE, SIDE, 3))
    return np.clip(draw(i) + noise, 0, 255).astype(np.uint8)


def make_product(tolerance: float | None = 0.1) -> ImagesProduct:
    product = make_image_product(LOOKS, "changed")
    gate = product.gate.model_dump(mode="json")
    if tolerance is not None:
        gate["tolerances"] |= {METRIC: {"overall": tolerance}}
    return ImagesProduct.model_validate(product.model_dump(mode="json") | {"gate": gate})


def redraw(build: Path, name: str, picture: Callable[[int], Picture], change: Callable[[CaseRecord], Any] = id) -> None:
    """Give a candidate other pictures and seal it anew; `change` returns scores that become others, or a number."""
    folder = build / "evaluations" / name
    records = []
    for i, record in enumerate(read_cases(folder / "shots.jsonl")):
        pixels = picture(i)
        Image.fromarray(pixels).save(folder / "shots" / f"{record.case_id}.png")
        output = hashlib.sha256(pixels.transpose(2, 0, 1).tobytes()).hexdigest()
        scores = changed if isinstance(changed := change(record), dict) else {}
        records.append(record.model_copy(update={"output": output, "scores": record.scores | scores}))
    seal(folder, records)


def seal(folder: Path, records: list[CaseRecord]) -> None:
    write_cases(folder / "shots.jsonl", records)
    index = json.loads((folder / "evaluation.json").read_text())
    for key, file in (("sha256", "shots.jsonl"), ("notes_sha256", "shots.json")):
        index["evals"]["shots"][key] = digest_file(folder / file)
    (folder / "evaluation.json").write_text(json.dumps(index))


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A reference, a candidate with its pictures and one whose pictures are noisy, evaluated and not yet compared."""
    build = tmp_path / "build"
    write_image_tree(build, make_product(), LOOKS)
    (build / "benchmarks").mkdir()
    for name in ("shots", "fine"):
        redraw(build, name, draw)
    redraw(build, "changed", draw_noisy)
    return build


def judge(build: Path, tolerance: float | None = 0.1) -> dict[str, Verdict]:
    return {v.candidate: v for v in compare_release(make_product(tolerance), build).judgement.verdicts}


def find_comparison(verdict: Verdict) -> Comparison:
    return next(c for c in verdict.comparisons if c.metric == METRIC and c.bucket is None)


def read_ssim(build: Path, name: str) -> dict[str, float]:
    rows = read_record(build / "benchmarks" / f"{name}.json", Likeness).evals["shots"]
    return {row.case_id: row.ssim for row in rows}


def test_the_same_pictures_are_exactly_one_and_so_is_the_reference(build: Path) -> None:
    measure_likeness(make_product(), build)
    assert set(read_ssim(build, "fine").values()) == {1.0}
    compared = compare_release(make_product(), build).judgement
    fine = next(v for v in compared.verdicts if v.candidate == "fine")
    found = find_comparison(fine)
    assert (found.reference, found.candidate, found.harm, found.outcome) == (1, 1, 0, "pass")
    assert [m.value for m in compared.reference_metrics if m.name == METRIC] == [1.0]
    assert not (build / "benchmarks/shots.json").exists(), "the reference beside itself is no comparison"


def test_a_loss_is_that_of_the_ssim_and_is_judged_on_both_sides_of_the_tolerance(build: Path) -> None:
    measure_likeness(make_product(), build)
    ours, theirs = (
        torch.from_numpy(np.stack([side(i) for i in range(NUM_CASES)])).permute(0, 3, 1, 2) / 255
        for side in (draw, draw_noisy)
    )
    loss = float((1 - structural_similarity(theirs, ours)).mean())
    assert 0.01 < loss < 0.2
    within, beyond = judge(build, 2 * loss)["changed"], judge(build, loss / 2)["changed"]
    assert find_comparison(within).harm == pytest.approx(loss, abs=1e-6)
    assert (find_comparison(within).outcome, within.outcome) == ("pass", "pass")
    assert (find_comparison(beyond).outcome, beyond.outcome) == ("fail", "fail"), "less alike is worse"


@pytest.mark.parametrize(
    ("share", "outcome"), [(1.1, "pass"), (0.5, "inconclusive"), (-0.1, "fail")]
)  # of the way from the mean loss to its bound
def test_it_is_judged_by_the_rules_of_every_mean(build: Path, share: float, outcome: str) -> None:
    """The pictures' SSIM to the float32 decode is judged alike where it has the same values: nothing is made up."""
    measure_likeness(make_product(), build)
    folder, ssim = build / "evaluations/changed", read_ssim(build, "changed")
    seal(
        folder,
        [
            record.model_copy(update={"scores": record.scores | {"ssim": ssim[record.case_id]}})
            for record in read_cases(folder / "shots.jsonl")
        ],
    )
    seen = find_comparison(judge(build)["changed"])
    product = make_product(tolerance := seen.harm + share * (seen.high - seen.harm))
    product.gate.tolerances["shots/decode_ssim"] = Tolerance(overall=tolerance)
    comparisons = {
        c.metric: c for c in compare_release(product, build).judgement.verdicts[0].comparisons if c.bucket is None
    }
    likeness, decode = (comparisons[name].model_dump(exclude={"metric"}) for name in (METRIC, "shots/decode_ssim"))
    assert likeness == decode and likeness["outcome"] == outcome
    losses = 1 - np.array(list(ssim.values()))
    error = float(losses.std(ddof=1)) / math.sqrt(NUM_CASES)
    students = float(losses.mean()) + float(stats.t.ppf(0.95, NUM_CASES - 1)) * error
    assert seen.high >= students, "one picture that lost much moves the bound outwards"


def test_without_a_tolerance_it_is_shown_and_decides_nothing(build: Path) -> None:
    measure_likeness(make_product(None), build)
    verdict = judge(build, None)["changed"]
    assert find_comparison(verdict).outcome == "reported" and verdict.outcome == "pass"


@pytest.mark.parametrize("flag", ["nonfinite", "black"])
def test_an_image_that_is_none_is_a_miss_and_not_opened(build: Path, flag: str) -> None:
    """NaN becomes black, which is more alike to a dark picture than nothing at all."""
    broken = {"sound": 0.0, flag: 1.0}
    redraw(
        build,
        "changed",
        lambda i: np.zeros_like(draw(i)) if i == 2 else draw(i),
        lambda record: broken if record.case_id == "shot-2" else {},
    )
    (build / "evaluations/changed/shots/shot-2.png").unlink()
    measure_likeness(make_product(), build)
    ssim = read_ssim(build, "changed")
    assert ssim.pop("shot-2") == 0 and set(ssim.values()) == {1.0}


def test_a_black_picture_of_both_sides_is_a_miss(build: Path) -> None:
    """Their digests are equal."""
    for name in ("shots", "changed"):
        redraw(build, name, lambda i: np.zeros((SIDE, SIDE, 3), dtype=np.uint8), lambda _: {"sound": 0.0, "black": 1.0})
    measure_likeness(make_product(), build)
    assert set(read_ssim(build, "changed").values()) == {0.0}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda path: path.unlink(), "expected an image, found no file; run `dvc repro`", id="missing"),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes()[:60]), "expected an image, got OSError while", id="cut"
        ),
        pytest.param(
            lambda path: shutil.copy(path.with_name("shot-1.png"), path),
            "expected the image that was judged, got other pixels",
            id="exchanged",
        ),
    ],
)
@pytest.mark.parametrize("side", ["shots", "changed"])
def test_a_picture_that_can_not_be_compared_refuses_by_name_and_no_other_candidate(
    build: Path, damage: Callable[[Path], Any], said: str, side: str
) -> None:
    path = build / f"evaluations/{side}/shots/shot-3.png"
    damage(path)
    lines = measure_likeness(make_product(), build)
    assert any(line.startswith(f"changed: refused: {path}: {said}") for line in lines)
    verdicts = judge(build)
    assert verdicts["changed"].outcome == "refused" and verdicts["fine"].outcome == "pass"
    (reason,) = [text for text in list_said(verdicts["changed"]) if str(path) in text]
    assert said in reason and "\n" not in reason


@pytest.mark.parametrize("side", [9, 2 * SIDE])
def test_pictures_of_another_size_refuse_by_name(build: Path, side: int) -> None:
    redraw(build, "changed", lambda i: np.full((side, side, 3), 90, dtype=np.uint8) if i == 5 else draw(i))
    measure_likeness(make_product(), build)
    (reason,) = [text for text in list_said(judge(build)["changed"]) if "changed/shots/shot-5.png" in text]
    assert f"expected {SIDE} x {SIDE} pixels, as in {build / 'evaluations/shots/shots/shot-5.png'}" in reason
    assert f"got {side} x {side}" in reason


def test_pictures_smaller_than_the_window_of_the_ssim_are_refused_in_one_line(build: Path) -> None:
    redraw(build, "shots", lambda _: np.full((8, 8, 3), 90, dtype=np.uint8))
    redraw(build, "changed", lambda _: np.full((8, 8, 3), 91, dtype=np.uint8))
    measure_likeness(make_product(), build)
    assert any("at least 11 pixels a side" in text for text in list_said(judge(build)["changed"]))


def test_numbers_of_other_pictures_are_refused(build: Path) -> None:
    """Each side drawn again: the stage that compares did not run since."""
    measure_likeness(make_product(), build)
    before = (build / "benchmarks/changed.json").read_bytes()
    redraw(build, "changed", lambda i: draw(0) if i == 6 else draw_noisy(i))
    assert any("case 'shot-6': expected the likeness of the pictures" in t for t in list_said(judge(build)["changed"]))
    redraw(build, "changed", draw_noisy)
    assert judge(build)["changed"].outcome != "refused"
    redraw(build, "shots", lambda i: draw(0) if i == 4 else draw(i))
    assert (build / "benchmarks/changed.json").read_bytes() == before
    assert any("case 'shot-4': expected the likeness of the pictures" in t for t in list_said(judge(build)["changed"]))


def test_a_gated_likeness_that_was_not_measured_is_refused_and_an_old_release_has_none(build: Path) -> None:
    path = build / "benchmarks/changed.json"
    assert any(f"{path}: expected how alike" in text for text in list_said(judge(build)["changed"]))
    plain = compare_release(make_product(None), build).judgement
    assert METRIC not in {m.name for m in plain.reference_metrics}
    assert all(v.outcome == "pass" and METRIC not in {c.metric for c in v.comparisons} for v in plain.verdicts)


def test_a_case_without_likeness_is_refused(build: Path) -> None:
    measure_likeness(make_product(), build)
    path = build / "benchmarks/changed.json"
    record = json.loads(path.read_text())
    record["evals"]["shots"] = record["evals"]["shots"][1:]
    path.write_text(json.dumps(record))
    assert any("expected the likeness of case 'shot-0', found none" in t for t in list_said(judge(build)["changed"]))
    path.write_bytes((build / "benchmarks/fine.json").read_bytes())
    assert any("is of 'fine'" in text for text in list_said(judge(build)["changed"]))


def test_pictures_are_paired_by_case_and_not_by_place(build: Path) -> None:
    folder = build / "evaluations/changed"
    measure_likeness(make_product(), build)
    before = read_ssim(build, "changed")
    seal(folder, read_cases(folder / "shots.jsonl")[::-1])
    measure_likeness(make_product(), build)
    assert read_ssim(build, "changed") == before
    assert find_comparison(judge(build)["changed"]).harm == pytest.approx(1 - np.mean(list(before.values())))


def test_only_what_changed_is_compared_again_and_what_is_gone_goes(build: Path) -> None:
    (build / "benchmarks/gone.json").write_text("{}")
    first = measure_likeness(make_product(), build)
    assert first == [f"{name}: {NUM_CASES} pictures compared with the reference's" for name in LOOKS]
    assert not (build / "benchmarks/gone.json").exists()
    redraw(build, "changed", lambda i: draw_noisy(i + 1))
    assert measure_likeness(make_product(), build) == [first[0], f"fine: {NUM_CASES} pictures taken over"]
    (build / "evaluations/fine/shots/shot-0.png").unlink()
    redraw(build, "shots", lambda i: draw_noisy(i + 2))
    assert all("taken over" not in line for line in measure_likeness(make_product(), build)), "the reference is another"
    assert "refused" in measure_likeness(make_product(), build)[1]
    Image.fromarray(draw(0)).save(build / "evaluations/fine/shots/shot-0.png")
    assert "compared" in measure_likeness(make_product(), build)[1], "the cause of a refusal may be gone"


def test_the_worst_pictures_are_the_least_alike_in_report_and_mlflow(build: Path) -> None:
    """By the scores alone, which are alike in all cases, case 0 would be it."""
    measure_likeness(make_product(), build)
    compared = compare_release(make_product(), build)
    pairs = compared.findings["changed"].pairs
    ranked = [i for _, i in list_worst_images(pairs, compared.evals)]
    ssim = read_ssim(build, "changed")
    assert ranked[0] == 7 and ranked == sorted(range(NUM_CASES), key=lambda i: ssim[f"shot-{i}"])
    runs = build_runs(compared.judgement, build)
    assert any("shot-7 - worst of changed" in shown.key for shown in runs[0].images if hasattr(shown, "key"))


def test_a_release_is_judged_again_without_the_pictures(build: Path, tmp_path: Path) -> None:
    measure_likeness(make_product(), build)
    product = make_product().restrict({"shots", "changed"})
    keep_records(build, ["shots", "changed"], tmp_path / "kept")
    restore_records(tmp_path / "kept", tmp_path / "again")
    assert not list((tmp_path / "again").rglob("*.png"))
    before, again = (compare_release(product, folder).judgement.verdicts[0] for folder in (build, tmp_path / "again"))
    assert find_comparison(before) == find_comparison(again) and before.outcome == again.outcome
    path = tmp_path / "again/benchmarks/changed.json"
    path.write_text(path.read_text().replace(read_record(path, Likeness).evals["shots"][0].candidate, "0" * 12))
    (verdict,) = compare_release(product, tmp_path / "again").judgement.verdicts
    assert any("case 'shot-0': expected the likeness" in text for text in list_said(verdict))


def judge_with_floor(build: Path, floor: dict[str, float]) -> ReleaseComparison:
    folder = build / "evaluations/shots"
    notes = json.loads((folder / "shots.json").read_text())
    (folder / "shots.json").write_text(json.dumps(notes | {"other_seed_ssim": floor}))
    seal(folder, read_cases(folder / "shots.jsonl"))
    measure_likeness(make_product(), build)
    return compare_release(make_product(), build)


def test_the_report_shows_the_floor_beside_the_candidates(build: Path) -> None:
    report = render_report(judge_with_floor(build, {"shot-1": 0.5, "shot-2": 0.25}))
    assert "| shots | the floor: `shots` with another seed, 2 prompts | 0.3750 | 0.2500 | shot-2 |" in report
    assert f"| shots | `fine` | 1.0000 | 1.0000 |  | {NUM_CASES} of {NUM_CASES} |" in report
    (row,) = [line for line in report.splitlines() if line.startswith("| shots | `changed` |")]
    assert "| shot-7 | 0 of " in row


@pytest.mark.parametrize("tier", ["critical", "advisory"])
def test_a_tolerance_that_lets_pictures_of_another_seed_pass_is_refused(build: Path, tier: Tier) -> None:
    """Of an advisory one nobody asks anything."""
    product = make_product(tolerance=0.3)
    product.gate.tolerances[METRIC] = Tolerance(overall=0.3, tier=tier)
    judge_with_floor(build, {"shot-1": 0.8, "shot-2": 0.7})
    fine = next(v for v in compare_release(product, build).judgement.verdicts if v.candidate == "fine")
    said = [text for text in list_said(fine) if "expected a tolerance below 0.25, got 0.3" in text]
    assert (fine.outcome, len(said)) == (("refused", 1) if tier == "critical" else ("pass", 0))
    assert judge(build, 0.24)["fine"].outcome == "pass"


def test_a_report_without_likeness_has_no_table_of_it(build: Path) -> None:
    assert "another seed" not in render_report(compare_release(make_product(None), build))


def make_case(i: int, seed: int = 5) -> PromptCase:
    return PromptCase(id=f"shot-{i}", cluster=str(i), prompt=f"a ball {i}", seed=seed)


@pytest.mark.parametrize(("num", "expected"), [(3, 3), (MAX_PROMPTS, MAX_PROMPTS), (192, MAX_PROMPTS)])
def test_few_prompts_from_all_over_the_eval_are_drawn_again_with_another_seed(num: int, expected: int) -> None:
    cases = [make_case(i, seed=2**63 - 1 - i) for i in range(num)]
    again = choose_other_seeds(cases)
    assert len(again) == expected == len({case.id for case in again})
    by_id = {case.id: case for case in cases}
    assert all(case.prompt == by_id[case.id].prompt and case.seed != by_id[case.id].seed for case in again)
    assert all(0 <= case.seed < 2**63 for case in again), "the largest seed has a successor, too"
    assert int(again[-1].id.split("-")[1]) >= num - num / expected - 1, "not the first ones alone"


def test_no_picture_of_the_eval_is_drawn_again_where_a_prompt_has_several_seeds() -> None:
    """Prompts with the seeds 0, 1, 2, 3 are what many evals have: the next seed is another case's."""
    cases = [PromptCase(id=f"ball-{i}", cluster="ball", prompt="a ball", seed=i) for i in range(4)]
    again = choose_other_seeds(cases)
    assert len({case.digest for case in [*cases, *again]}) == 8


def test_the_floor_is_between_two_pictures_of_a_prompt_and_a_broken_one_is_a_miss(tmp_path: Path) -> None:
    def make_drawn(i: int, pixels: Picture, sound: float = 1.0) -> tuple[CaseRecord, bytes]:
        Image.fromarray(pixels).save(tmp_path / "p.png")
        record = CaseRecord(
            case_id=f"shot-{i}",
            input_digest="d",
            cluster="c",
            prompt="",
            output="",
            scores={"sound": sound},
            fingerprint="f",
        )
        return record, (tmp_path / "p.png").read_bytes()

    floor = measure_floor(
        [
            (make_drawn(0, draw(0)), make_drawn(0, draw_noisy(7))),
            (make_drawn(1, draw(1)), make_drawn(1, draw(1), sound=0.0)),
        ]
    )
    assert floor == {"shot-0": compare_pictures(draw(0), draw_noisy(7)), "shot-1": 0.0}
    assert 0 < floor["shot-0"] < 1


def test_a_negative_is_no_less_alike_than_no_picture() -> None:
    """A miss must be the worst that there is: else a black picture would beat a negative."""
    board = (np.indices((SIDE, SIDE)).sum(axis=0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, axis=2)
    assert compare_pictures(board, 255 - board) == 0
    assert compare_pictures(board, board) == pytest.approx(1)
