"""The report of the image product: the picture of guidance only where it says something, and no table without rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline.gate.compare import ReleaseComparison
from pipeline.products.images.show.guidance import describe_guidance, list_guided, plot_guidance
from pipeline.products.images.show.headroom import plot_headroom
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import read_cases
from pipeline.records.fingerprints import fingerprint
from pipeline.records.record_files import write_cases
from pipeline.report.pictures.worst import plot_worst_images
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.synthetic_images import Look, make_image_product, write_image_tree

FLIPS = "|  | image | prompt |"


def judge(build: Path, looks: dict[str, Look]) -> ReleaseComparison:
    product = make_image_product(looks, next(iter(looks)))
    write_image_tree(build, product, looks)
    return compare_release(product, build)


def find_guided(compared: ReleaseComparison) -> list[str]:
    return list(list_guided({name: m.evidence for name, m in compared.findings.items()}, "shots"))


@pytest.mark.parametrize(
    "guidance",
    [
        pytest.param({"scale": 12}, id="scale"),
        pytest.param({"scale": 5, "rescale": 0.7}, id="rescale"),
        pytest.param({"scale": 5, "by_category": {"white": {"scale": 3}}}, id="of-a-category"),
        pytest.param({"scale": 5, "dynamic_threshold_percentile": 99.5}, id="thresholded"),
    ],
)
def test_every_way_to_guide_otherwise_is_in_the_picture(tmp_path: Path, guidance: dict[str, Any]) -> None:
    """A comparison of the scale alone would take these for the reference's guidance."""
    compared = judge(tmp_path, {"half": Look(), "guided": Look(guidance=guidance)})
    assert find_guided(compared) == ["shots", "guided"]
    report = render_report(compared)
    assert "](guidance.png)" in report
    assert "What guidance does: `shots` (scale 5, rescale 0); `guided` (scale " in report


def test_without_another_guidance_the_report_has_no_such_picture(tmp_path: Path) -> None:
    compared = judge(tmp_path, {"half": Look(), "same": Look(guidance={"scale": 5})})
    assert find_guided(compared) == []
    assert "guidance.png" not in render_report(compared)
    plot_guidance(compared, tmp_path / "guidance.png")
    assert (tmp_path / "guidance.png").is_file(), "DVC expects every output of a stage"


@pytest.mark.parametrize(
    ("notes", "num_panels"),
    [
        ({"std_ratio_by_step": [2.5, 1.5]}, 2),
        ({"std_ratio_by_step": []}, 1),
        ({}, 1),
    ],
)
def test_steps_are_drawn_where_they_were_noted(tmp_path: Path, notes: dict[str, Any], num_panels: int) -> None:
    compared = judge(tmp_path, {"guided": Look(guidance={"scale": 12}, notes=notes)})
    plot_guidance(compared, tmp_path / "guidance.png")
    with Image.open(tmp_path / "guidance.png") as opened:
        assert (opened.width > 1000) == (num_panels == 2)
    assert ("On the right panel: " in render_report(compared)) == (num_panels == 2)


def test_a_candidate_that_could_not_be_read_does_not_stop_the_picture(tmp_path: Path) -> None:
    looks = {"guided": Look(guidance={"scale": 12}), "gone": Look(guidance={"scale": 9})}
    judge(tmp_path, looks)
    (tmp_path / "evaluations/gone/evaluation.json").unlink()
    compared = compare_release(make_image_product(looks, "guided"), tmp_path)
    assert find_guided(compared) == ["shots", "guided"]
    plot_guidance(compared, tmp_path / "guidance.png")
    (tmp_path / "evaluations/shots/evaluation.json").unlink()
    assert find_guided(compare_release(make_image_product(looks, "guided"), tmp_path)) == []


def test_guidance_is_described_in_full(tmp_path: Path) -> None:
    guidance = {
        "scale": 7.5,
        "rescale": 0.3,
        "dynamic_threshold_percentile": 99.5,
        "sample_max_value": 2.5,
        "by_category": {"white": {"scale": 3}},
    }
    evidence = judge(tmp_path, {"guided": Look(guidance=guidance)}).findings["guided"].evidence
    assert evidence is not None and describe_guidance(evidence) == (
        "scale 7.5, rescale 0.3, thresholded at 99.5 % up to 2.5; white: scale 3, rescale 0"
    )


def test_a_failure_without_flips_has_no_empty_table(tmp_path: Path) -> None:
    report = render_report(judge(tmp_path, {"bad": Look(changes={"clip": -0.3})}))
    assert "### Cases behind it" in report and "Cases that lost most, clip" in report
    assert FLIPS not in report


def test_a_failure_with_flips_names_the_images(tmp_path: Path) -> None:
    report = render_report(judge(tmp_path, {"bad": Look(changes={"sound": -1.0, "nonfinite": 1.0})}))
    assert FLIPS in report and "| loss | shot-0 | ball 0 |" in report


@pytest.mark.parametrize("name", ["bad", "shots"])
def test_records_that_are_unfit_are_refused_and_reported(tmp_path: Path, name: str) -> None:
    """The report names them; no table or picture of it may need them."""
    looks = {"bad": Look(), "guided": Look(guidance={"scale": 12})}
    judge(tmp_path, looks)
    (tmp_path / f"evaluations/{name}/shots.jsonl").write_text("edited")
    compared = compare_release(make_image_product(looks, "bad"), tmp_path)
    assert "the records were edited or cut" in render_report(compared)
    for draw in (plot_guidance, plot_worst_images, plot_headroom):
        draw(compared, tmp_path / "picture.png")


def test_sides_that_ran_on_other_hardware_are_not_compared(tmp_path: Path) -> None:
    looks = {"guided": Look(guidance={"scale": 12})}
    judge(tmp_path, looks)
    for name, device in (("shots", "cpu"), ("guided", "another")):
        folder = tmp_path / "evaluations" / name
        evaluation = json.loads((folder / "evaluation.json").read_text())
        evaluation["served_by"]["hardware"] = {"device": device}
        evaluation["fingerprint"] = fingerprint(evaluation["served_by"])
        write_cases(
            folder / "shots.jsonl",
            [
                r.model_copy(update={"fingerprint": evaluation["fingerprint"]})
                for r in read_cases(folder / "shots.jsonl")
            ],
        )
        evaluation["evals"]["shots"]["sha256"] = digest_file(folder / "shots.jsonl")
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    (verdict,) = compare_release(make_image_product(looks, "guided"), tmp_path).judgement.verdicts
    assert verdict.outcome == "refused" and "`dvc repro -f -s evaluate@shots`" in list_said(verdict)[0]


def test_a_file_that_no_step_names_is_named(tmp_path: Path) -> None:
    looks = {"guided": Look(guidance={"scale": 12})}
    judge(tmp_path, looks)
    path = tmp_path / "candidates/guided/candidate.json"
    built = json.loads(path.read_text())
    built["checkpoint"]["files"] = {"scheduler/scheduler_config.json": "another"}
    path.write_text(json.dumps(built))
    report = render_report(compare_release(make_image_product(looks, "guided"), tmp_path))
    assert "Files that differ from the reference's: `scheduler/scheduler_config.json`." in report
