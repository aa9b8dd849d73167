"""What MLflow shows of a network product: boxes and what was lost, a stitch, costs; whatever is broken is a line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.products.vision.show.boxes import LOST
from pipeline.products.vision.show.runs import STITCH
from pipeline.report.mlflow_runs.picture_view import VIEW
from pipeline.report.mlflow_runs.run_contents import RunContents
from pipeline.report.mlflow_runs.tracking import log_runs, write_pages
from pipeline.report.pictures.shown import draw_pictures
from tests.fakes.judging import build_runs, compare_release
from tests.fakes.synthetic_detections import Change
from tests.fakes.synthetic_networks import (
    NOTES,
    Way,
    compile_notes,
    make_network_product,
    time_notes,
    write_detector,
    write_upscaler,
)

SAME = Change(score=0, box=0)
DETECTORS = {
    "same": Way(
        [{"kind": "channels_last"}],
        by=SAME,
        notes={
            "speed": time_notes(high=0.99),
            "layout": {"other_formats": ["head"], "num_reorders": {"first": 9, "last": 1}},
        },
    ),
    "losing": Way(
        [{"kind": "compile", "mode": "default"}],
        by=Change(score=0, box=0, drop_small=0.5),
        notes={
            "speed": time_notes(),
            "compile": compile_notes(num_graph_breaks=1, num_recompilations=2, first_call_s=3.5),
        },
    ),
}
UPSCALERS = {
    "tiled": Way([{"kind": "tiling", "tile": 16, "overlap": 0.0, "window": "none"}], seam=5.0, notes={"work": 1.3}),
    "half": Way([{"kind": "precision", "dtype": "bfloat16"}]),
}


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_detector(
        tmp_path_factory.mktemp("detector"), make_network_product("detector", DETECTORS), DETECTORS, num_images=12
    )


@pytest.fixture(scope="module")
def upscaler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_upscaler(tmp_path_factory.mktemp("upscaler"), make_network_product("upscaler", UPSCALERS), UPSCALERS)


def describe(build: Path, kind: str, ways: dict[str, Way]) -> dict[str, RunContents]:
    runs = build_runs(compare_release(make_network_product(kind, ways), build).judgement, build)
    return {run.candidate: run for run in runs}


def has_lost(picture: Any) -> bool:
    """Say whether a box of what is lost is drawn; pictures are grey."""
    colour = [int(LOST[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((np.abs(np.asarray(picture).astype(int) - colour).max(axis=2) < 40).any())


def test_every_run_of_a_detector_shows_its_boxes_and_what_it_lost(detector: Path) -> None:
    runs = describe(detector, "detector", DETECTORS)
    keys = {name: [shown.key for shown in run.images] for name, run in runs.items()}
    assert keys["plain"] == keys["same"] == keys["losing"] and len(keys["plain"]) == 1
    assert re.fullmatch(r"images/1 scene-\d+ - worst of losing", keys["plain"][0])
    drawn = {name: draw_pictures(run.images)[0][keys["plain"][0]] for name, run in runs.items()}
    assert {name: has_lost(picture) for name, picture in drawn.items()} == {
        "plain": False,
        "same": False,
        "losing": True,
    }
    assert "every image has the boxes of the reference's" in runs["same"].note
    assert "worst image: scene-" in runs["losing"].note


def test_a_tiled_upscaler_shows_a_stitch(upscaler: Path) -> None:
    runs = describe(upscaler, "upscaler", UPSCALERS)
    own = {name: [shown.key for shown in run.images if " - worst of " not in shown.key] for name, run in runs.items()}
    assert own == {"plain": [], "tiled": ["images/difference x 16", f"images/{STITCH}"], "half": []}
    pictures, problems = draw_pictures(runs["tiled"].images)
    assert not problems and pictures[f"images/{STITCH}"].width > 256
    assert all(re.fullmatch(r"images/[\w.\- ]+", shown.key) for shown in runs["tiled"].images)


def test_costs_are_metrics_of_a_run(detector: Path, upscaler: Path) -> None:
    runs = describe(detector, "detector", DETECTORS)
    costs = {name: {k: v for k, v in run.metrics.items() if k.startswith("cost/")} for name, run in runs.items()}
    shared = {
        "cost/work": 1.0,
        "cost/peak_mib": 8.0,
        "cost/largest_error_percent": pytest.approx(0.2),
        "cost/least_headroom_doublings": 7.0,
    }
    assert costs["plain"] == shared
    assert costs["losing"] == shared | {
        "cost/time_percent_of_baseline": 70.0,
        "cost/num_graph_breaks": 1.0,
        "cost/num_graphs": 3.0,
        "cost/num_recompilations": 2.0,
        "cost/first_call_s": 3.5,
    }
    assert costs["same"] == shared | {
        "cost/time_percent_of_baseline": 70.0,
        "cost/num_other_formats": 1.0,
        "cost/num_reorders_first": 9.0,
        "cost/num_reorders_last": 1.0,
    }
    assert describe(upscaler, "upscaler", UPSCALERS)["tiled"].metrics["cost/work"] == 1.3


def test_an_overflow_has_no_number_that_mlflow_could_not_take(tmp_path: Path) -> None:
    broken = {"relative_error": None, "absmax": None, "nonfinite_count": 1, "headroom_bits": None}
    zero = {"relative_error": 0.0, "absmax": 0.0, "nonfinite_count": 0, "headroom_bits": None}
    ways = {
        "hot": Way(by=SAME, notes={"layers": NOTES["layers"] | {"head": broken}}),
        "dead": Way(by=SAME, notes={"layers": {"stem": zero}}),
    }
    build = write_detector(tmp_path, make_network_product("detector", ways), ways, num_images=4)
    runs = describe(build, "detector", ways)
    assert runs["hot"].metrics["cost/least_headroom_doublings"] == -4
    assert np.isfinite([*runs["hot"].metrics.values()]).all()
    assert "cost/largest_error_percent" not in runs["hot"].metrics
    assert "cost/least_headroom_doublings" not in runs["dead"].metrics


def test_params_and_predictions_are_for_people(detector: Path, upscaler: Path) -> None:
    """Catches boxes as JSON, digests of pictures, and a finite output that is called right."""
    run = describe(detector, "detector", DETECTORS)["losing"]
    assert run.params["steps"] == "compile default" and run.params["serving"] == "torch float32, compiled default"
    assert all(
        re.fullmatch(r"finite: \d of 5 objects found at IoU 0.5, 0 false alarms", said)
        for said in run.predictions["output"]
    )
    tiled = describe(upscaler, "upscaler", UPSCALERS)["tiled"]
    assert tiled.params["steps"] == "tiling tile 16 overlap 0 none"
    assert tiled.predictions["output"][0] == "finite: 36.50 dB, SSIM 0.9000, seams of 5.00 levels"


def test_a_second_log_adds_nothing(detector: Path, tmp_path: Path) -> None:
    runs = list(describe(detector, "detector", DETECTORS).values())
    first = log_runs(runs, tmp_path, product="detector")
    again = log_runs(list(describe(detector, "detector", DETECTORS).values()), tmp_path, product="detector")
    assert [(r.run_id, r.is_new) for r in again] == [(r.run_id, False) for r in first]
    write_pages(first, tmp_path, product="detector", has_pictures=any(run.images for run in runs))
    assert f"viewStateShareKey={VIEW}" in (tmp_path / "mlartifacts/pages-detector.txt").read_text()


def test_products_share_no_experiment_and_no_file(detector: Path, upscaler: Path, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    runs = {
        "people": list(describe(detector, "detector", DETECTORS).values()),
        "faces": list(describe(detector, "detector", DETECTORS).values()),
        "upscaler": list(describe(upscaler, "upscaler", UPSCALERS).values()),
    }
    logged = {product: log_runs(shown, tmp_path, product=product) for product, shown in runs.items()}
    for product, shown in logged.items():
        write_pages(shown, tmp_path, product=product, has_pictures=False)
    assert all(run.is_new for shown in logged.values() for run in shown), "another product's run is none of its own"
    ids = {product: {run.experiment_id for run in shown} for product, shown in logged.items()}
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert {product: [client.get_experiment(i).name for i in found] for product, found in ids.items()} == {
        "people": ["quantgate people"],
        "faces": ["quantgate faces"],
        "upscaler": ["quantgate upscaler"],
    }
    for product, shown in logged.items():
        found = client.search_runs([*ids[product]])
        assert {run.info.run_id for run in found} == {run.run_id for run in shown}, "all active: none was binned"
        pages = (tmp_path / f"mlartifacts/pages-{product}.txt").read_text()
        assert all(run.run_id in pages for run in shown) and f"viewStateShareKey={VIEW}" not in pages


def test_a_verdict_of_no_gain_has_a_colour_of_its_own(tmp_path: Path) -> None:
    ways = {"same": DETECTORS["same"], "losing": Way(by=SAME)}
    product = make_network_product("detector", ways, {"scenes/ap": {"overall": 0.2}})
    runs = build_runs(
        compare_release(product, write_detector(tmp_path, product, ways, num_images=80)).judgement, tmp_path / "build"
    )
    assert [run.params["gate"] for run in runs] == ["reference", "no gain (release)", "pass (release)"]
    assert len({run.color for run in runs}) == 3


Damage = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        pytest.param("scenes.npz", lambda p: p.write_bytes(b"x"), None, id="table"),
        pytest.param("scenes.npz", lambda p: p.unlink(), None, id="no-table"),
        pytest.param("scenes.json", lambda p: p.write_text("{}"), None, id="notes"),
        pytest.param("scenes.jsonl", lambda p: p.write_text("{}"), "no predictions", id="records"),
    ],
)
def test_broken_evidence_never_stops_a_run(
    detector: Path, tmp_path: Path, file: str, damage: Damage, said: str | None
) -> None:
    build = tmp_path / "build"
    shutil.copytree(detector, build)
    damage(build / "evaluations/losing" / file)
    run = describe(build, "detector", DETECTORS)["losing"]
    draw_pictures(run.images)
    assert "refused" in run.params["gate"] and (said is None or said in run.note)


def test_a_picture_that_is_gone_is_a_line(detector: Path, upscaler: Path, tmp_path: Path) -> None:
    ways = {"losing": DETECTORS["losing"]}
    build = write_detector(tmp_path, make_network_product("detector", ways), ways, num_images=8)
    shutil.rmtree(tmp_path / "pictures")
    pictures, problems = draw_pictures(describe(build, "detector", ways)["losing"].images)
    assert not pictures and "expected an image, found no file" in problems[0]
    build = tmp_path / "copy"
    shutil.copytree(upscaler, build)
    shutil.rmtree(build / "evaluations/plain/views")
    pictures, problems = draw_pictures(describe(build, "upscaler", UPSCALERS)["tiled"].images)
    assert len(problems) == 2 and all("expected an image, found no file" in problem for problem in problems)


def test_the_key_covers_the_boxes_of_both_sides(detector: Path, tmp_path: Path) -> None:
    before = {name: run.key for name, run in describe(detector, "detector", DETECTORS).items()}
    build = tmp_path / "build"
    shutil.copytree(detector, build)
    assert {name: run.key for name, run in describe(build, "detector", DETECTORS).items()} == before
    (build / "evaluations/losing/scenes.npz").write_bytes(b"x")
    after = {name: run.key for name, run in describe(build, "detector", DETECTORS).items()}
    assert after["losing"] != before["losing"]
