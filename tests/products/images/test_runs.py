"""The images of a run in MLflow: which are shown, that they are those judged, and that logging twice adds nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.gate.case_table import CaseTable
from pipeline.gate.image_plots import plot_worst_images
from pipeline.gate.pictures import JudgedImage
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import read_cases
from pipeline.records.record_files import write_cases
from pipeline.report.flips import list_worst_images
from pipeline.report.mlflow_runs.image_contents import COLUMN, MAX_CASES, VIEW, ShownImage, describe_view, order_columns
from pipeline.report.mlflow_runs.run_contents import RunContents
from pipeline.report.mlflow_runs.run_pictures import MAX_SIDE, draw_pictures, fit_size
from pipeline.report.mlflow_runs.tracking import log_runs, write_pages
from tests.fakes.judging import compare_release, describe_runs
from tests.fakes.synthetic_images import SIDE, Look, make_image_product, write_image_tree

MAX_LOGGED = 12  # images a run
LOOKS = {"fine": Look(worst=3), "bad": Look(changes={"clip": -0.1}, worst=7), "alike": Look(worst=3)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("project") / "build"
    write_image_tree(build, make_image_product(LOOKS, "bad"), LOOKS)
    return build


def describe(build: Path, looks: dict[str, Look] = LOOKS, release: str = "bad") -> list[RunContents]:
    return describe_runs(compare_release(make_image_product(looks, release), build).judgement, build)


def list_images(run: RunContents, num: int) -> list[ShownImage]:
    """List what a run shows of one image, or of two."""
    return [shown for shown in run.images if isinstance(shown, ShownImage) and len(shown.images) == num]


def list_cases(run: RunContents) -> list[str]:
    return [image.key for image in list_images(run, 1)]


def test_every_run_shows_the_worst_case_of_each_candidate(built: Path) -> None:
    """Were they chosen for each run alone, no two columns of the grid could be compared."""
    reference, *others = runs = describe(built)
    assert list_cases(reference) == ["images/1 shot-7 - worst of bad", "images/2 shot-3 - worst of fine and 1 more"], (
        "the released candidate's first, a shared case once"
    )
    assert all(list_cases(run) == list_cases(reference) for run in others)
    for run in runs:
        assert {image.images[0].path.parts[-3] for image in list_images(run, 1)} == {run.candidate}
    assert "image 1 of bad, image 2 of fine and alike" in reference.note
    assert "worst image: shot-7 (image 1)" in next(run.note for run in runs if run.candidate == "bad")


def test_a_run_adds_its_own_difference_and_headroom(built: Path) -> None:
    for run in describe(built):
        differences = list_images(run, 2)
        assert [image.images[0].path.parts[-3] for image in differences] == ["shots"] * (run.candidate != "shots")
        assert [shown.notes for shown in run.images if isinstance(shown, ShownImage) and shown.notes] == [
            built / "evaluations" / run.candidate / "shots.json"
        ]


def test_a_candidate_with_the_references_own_images_takes_no_row(built: Path, tmp_path: Path) -> None:
    """It would leave no room for one that differs, and show nothing."""
    build = tmp_path / "build"
    shutil.copytree(built, build)
    folder = build / "evaluations/bad"
    outputs = [record.output for record in read_cases(build / "evaluations/shots/shots.jsonl")]
    write_cases(
        folder / "shots.jsonl",
        [
            record.model_copy(update={"output": output})
            for record, output in zip(read_cases(folder / "shots.jsonl"), outputs, strict=True)
        ],
    )
    reference, *others = describe(build)
    assert list_cases(reference) == ["images/1 shot-3 - worst of fine and 1 more"]
    run = next(run for run in others if run.candidate == "bad")
    assert "every image has the pixels of the reference's" in run.note
    listed = sorted(describe(build, release="fine"), key=lambda run: run.column)
    assert [run.candidate for run in listed] == ["bad", "alike", "fine", "shots"]
    assert not list_images(run, 2), "no difference to draw"


def test_many_candidates_show_no_more_than_a_dozen_images(tmp_path: Path) -> None:
    looks = {f"c{i}": Look(worst=2 * i) for i in range(MAX_CASES + 3)}
    last = f"c{MAX_CASES + 2}"
    write_image_tree(tmp_path, make_image_product(looks, last), looks)
    runs = describe(tmp_path, looks, last)
    assert all(len(list_cases(run)) == MAX_CASES and len(run.images) <= MAX_LOGGED for run in runs)
    assert list_cases(runs[0])[0].endswith(f"worst of {last}"), "what is to be released is never left out"
    assert "its difference alone is shown" in next(run.note for run in runs if run.candidate == f"c{MAX_CASES + 1}")


def test_odd_names_of_cases_become_keys_that_mlflow_takes(tmp_path: Path) -> None:
    """A slash would open another section, and two names may be spelled alike."""
    write_image_tree(tmp_path, make_image_product(LOOKS, "bad"), LOOKS, case_id="ü/a:{i}" + "x" * 90)
    (keys,) = {tuple(list_cases(run)) for run in describe(tmp_path)}
    assert len(set(keys)) == 2 and all(re.fullmatch(r"images/[\w.\- ]+", key, re.ASCII) for key in keys)
    assert max(map(len, keys)) < 180, "it becomes part of a file's name"


def test_the_key_covers_which_images_are_shown_and_what_is_in_them(built: Path, tmp_path: Path) -> None:
    before = {run.candidate: run.key for run in describe(built)}
    build = tmp_path / "build"
    shutil.copytree(built, build)
    (build / "evaluations/bad/shots/shot-7.png").unlink()
    after = {run.candidate: run.key for run in describe(build)}
    assert {name for name in before if before[name] != after[name]} == {"bad"}
    (build / "evaluations/bad/shots/shot-0.png").unlink()
    assert {run.candidate: run.key for run in describe(build)} == after, "which is not shown"


def test_a_refused_candidate_has_no_images_and_takes_none_from_the_others(built: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    shutil.copytree(built, build)
    shutil.rmtree(build / "evaluations/bad")
    reference, *others = describe(build)
    assert list_cases(reference) == ["images/1 shot-3 - worst of fine and 1 more"]
    assert next(run.images for run in others if run.candidate == "bad") == ()


def open_client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")


def list_logged(root: Path, run_id: str) -> list[str]:
    """Return the keys of a run's images, as MLflow reads them from file names."""
    files = (root / "mlartifacts" / run_id / "artifacts/images").glob("*.png")
    return sorted(file.name.partition("+step+0+")[0].replace("~", "/") for file in files)


def test_a_second_track_logs_nothing(built: Path, tmp_path: Path) -> None:
    runs = describe(built)
    first = log_runs(runs, tmp_path, product="shots")
    for run, logged in zip(runs, first, strict=True):
        assert list_logged(tmp_path, logged.run_id) == sorted(image.key for image in run.images)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mlartifacts").rglob("*")}
    database = digest_file(tmp_path / "mlflow.db")
    again = log_runs(describe(built), tmp_path, product="shots")
    assert [(run.run_id, run.is_new) for run in again] == [(run.run_id, False) for run in first]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mlartifacts").rglob("*")} == before
    assert digest_file(tmp_path / "mlflow.db") == database

    experiment = open_client(tmp_path).get_experiment(first[0].experiment_id)
    (grid,) = json.loads(json.loads(experiment.tags[f"mlflow.sharedViewState.{VIEW}"])["state"])["compareRunCharts"]
    assert set(grid["imageKeys"]) == {image.key for run in runs for image in run.images}
    write_pages(first, tmp_path, product="shots", has_pictures=True)
    assert f"&viewStateShareKey={VIEW}\n" in (tmp_path / "mlartifacts/pages-shots.txt").read_text()


Damage = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda p: p.unlink(), "expected an image, found no file", id="missing"),
        pytest.param(lambda p: p.write_bytes(b""), "expected an image, got UnidentifiedImageError", id="empty"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:60]), "expected an image, got ", id="cut"),
        pytest.param(
            lambda p: p.write_bytes(p.with_name("shot-1.png").read_bytes()), "got other pixels", id="exchanged"
        ),
    ],
)
def test_an_image_that_can_not_be_shown_is_a_line_in_the_note(
    built: Path, tmp_path: Path, damage: Damage, said: str
) -> None:
    build = tmp_path / "build"
    shutil.copytree(built, build)
    damage(build / "evaluations/bad/shots/shot-3.png")
    logged = {run.candidate: run for run in log_runs(describe(build), tmp_path, product="shots")}
    run_id = logged["bad"].run_id
    assert list_logged(tmp_path, run_id) == [
        "images/1 shot-7 - worst of bad",
        "images/difference x 4",
        "images/headroom",
    ]
    note = open_client(tmp_path).get_run(run_id).data.tags["mlflow.note.content"]
    (line,) = [line for line in note.splitlines() if "not shown" in line]
    assert "images/2 shot-3 - worst of fine and 1 more: " in line and said in line
    shutil.copy(built / "evaluations/bad/shots/shot-3.png", build / "evaluations/bad/shots/shot-3.png")
    again = {run.candidate: run.is_new for run in log_runs(describe(build), tmp_path, product="shots")}
    assert again == {"shots": False, "fine": False, "bad": True, "alike": False}, "repaired, it is shown"


def test_broken_bytes_never_stop_a_run(built: Path, tmp_path: Path) -> None:
    """Pillow says "broken" in many ways: whatever byte is hit, the run is logged without the image."""
    whole = (built / "evaluations/bad/shots/shot-3.png").read_bytes()
    path = tmp_path / "image.png"
    for i in range(len(whole)):
        for broken in (whole[:i], whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :]):
            path.write_bytes(broken)
            pictures, problems = draw_pictures([ShownImage("k", (JudgedImage(path, "no digest"),))])
            assert not pictures and len(problems) == 1 and "\n" not in problems[0]


@pytest.mark.parametrize("text", ["", "[]", '{"decoder": {"up": {}}}', '{"decoder": {"up": null}}'])
def test_broken_notes_never_stop_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.json").write_text(text)
    pictures, problems = draw_pictures([ShownImage("k", notes=tmp_path / "notes.json")])
    assert not pictures and "expected the ranges of a decoder's modules" in problems[0]


def test_a_missing_image_does_not_stop_compare(built: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    shutil.copytree(built, build)
    compared = compare_release(make_image_product(LOOKS, "bad"), build)
    plot_worst_images(compared, tmp_path / "whole.png")
    (build / "evaluations/bad/shots/shot-7.png").unlink()
    plot_worst_images(compared, tmp_path / "gap.png")
    assert (tmp_path / "gap.png").read_bytes() != (tmp_path / "whole.png").read_bytes()


def test_small_images_grow_without_new_colours_and_large_ones_shrink() -> None:
    """MLflow's thumbnail would smooth a small image, and seams with it."""
    picture = np.random.default_rng(0).integers(0, 256, (SIDE, 2 * SIDE, 3), dtype=np.uint8)
    grown = fit_size(picture)
    assert grown.size == (256, 128)
    assert np.array_equal(np.asarray(grown), picture.repeat(16, axis=0).repeat(16, axis=1))
    assert fit_size(np.zeros((500, 2000, 3), dtype=np.uint8)).size == (MAX_SIDE, MAX_SIDE // 4)


@pytest.mark.parametrize("num_runs", [1, 9, 10, 11, 25])
def test_the_reference_is_the_first_column_and_no_release_is_left_out(num_runs: int) -> None:
    """MLflow's grid shows the first ten runs of the list, the last of them first."""
    names = [str(i) for i in range(num_runs)]
    columns = order_columns(names)
    listed = sorted(names, key=lambda name: columns[name])
    assert listed[:10][::-1] == names[:10]


def test_the_view_holds_every_image_once() -> None:
    view = describe_view([[ShownImage("images/2 b"), ShownImage("images/1 a")]] * 2)
    assert view["compareRunCharts"][0]["imageKeys"] == ["images/1 a", "images/2 b"]
    assert view["compareRunCharts"][0]["metricSectionId"] == view["compareRunSections"][0]["uuid"]


def test_another_release_moves_the_columns_of_runs_that_stay(built: Path, tmp_path: Path) -> None:
    def read_columns() -> list[str]:
        client = open_client(tmp_path)
        runs = client.search_runs([first[0].experiment_id], order_by=[f"tags.`{COLUMN}` DESC"])
        return [run.info.run_name for run in runs]

    runs = describe(built)
    first = log_runs(runs, tmp_path, product="shots")
    assert read_columns() == ["shots", "bad", "fine", "alike"]
    moved = [replace(run, column=column) for run, column in zip(runs, ("0009", "0006", "0008", "0007"), strict=True)]
    assert not any(run.is_new for run in log_runs(moved, tmp_path, product="shots"))
    assert read_columns() == ["shots", "bad", "alike", "fine"]
    log_runs(runs, tmp_path, product="shots", dvc_experiment="sweep-1")
    assert read_columns()[:4] == ["shots", "bad", "alike", "fine"], "an experiment takes no column from the workspace"


def test_the_worst_image_is_unsound_or_lost_most_and_not_just_beyond_a_limit(tmp_path: Path) -> None:
    """A rate has no size: of all images beyond its limit the first would be the worst."""
    looks = {"bad": Look(changes={"oversaturated": 1.0}, worst=9)}
    write_image_tree(tmp_path, make_image_product(looks, "bad"), looks)
    compared = compare_release(make_image_product(looks, "bad"), tmp_path)
    pairs = compared.measured["bad"].pairs
    assert list_worst_images(pairs, compared.evals)[0] == ("shots", 9)
    records = read_cases(tmp_path / "evaluations/bad/shots.jsonl")
    records[4] = records[4].model_copy(update={"scores": records[4].scores | {"sound": 0.0}})
    pairs["shots"] = replace(pairs["shots"], candidate=CaseTable.of(records))
    assert list_worst_images(pairs, compared.evals)[:2] == [("shots", 4), ("shots", 9)]
