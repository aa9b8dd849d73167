"""`scripts/propose_conv_policy.py` on the shipped detector that F(4,3) breaks: what it writes, and what it refuses."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from models.make.imbalance_people import BRANCH
from tests.paths import ROOT

SECTION = """\
kind: vision
reference: plain
release: [found]
adapter: models/people/detector.py
calibration_images: evalsets/scenes-calibration   # nothing is evaluated on it
evals:
  scenes: {kind: detection, evalset: evalsets/scenes}
serving: {batch_size: 8, num_threads: 1}
resources: {num_workers: 1}
gate:
  alpha: 0.05
  on_inconclusive: block
  tolerances:
    scenes/ap: {overall: 0.02}
    scenes/ap_small: {overall: 0.02}
    scenes/ap_medium: {overall: 0.02}
    scenes/ap_large: {overall: 0.02}
    scenes/finite_output_rate: {overall: 0.02}
"""

CANDIDATES = """\
plain: {product: people, checkpoint: models/people-hard, steps: []}
found:
  product: people
  checkpoint: models/people-hard
  steps:
    - kind: conv_policy
      algorithm: direct    # of most
      dtype: float32
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a folder with the shipped models and evalsets, and a params.yaml of its own."""
    for name in ("models", "evalsets"):
        (tmp_path / name).symlink_to(ROOT / name)
    yaml = YAML()
    data = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["products"] = {"people": yaml.load(SECTION)}
    data["candidates"] = yaml.load(CANDIDATES)
    text = io.StringIO()
    yaml.dump(data, text)
    (tmp_path / "params.yaml").write_text(text.getvalue(), encoding="utf-8")
    return tmp_path


def run(project: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/propose_conv_policy.py"), *argv],
        cwd=project,
        text=True,
        capture_output=True,
        timeout=200,
    )


def read_steps(project: Path) -> list[dict[str, Any]]:
    data = YAML(typ="safe").load((project / "params.yaml").read_text(encoding="utf-8"))
    return data["candidates"]["found"]["steps"]


def test_the_policy_is_found_and_written(project: Path) -> None:
    """Every line of params.yaml but those of the step stays, comments too."""
    before = (project / "params.yaml").read_text(encoding="utf-8").splitlines()
    done = run(project, "found", "--dtype", "float16", "--images", "2")
    assert done.returncode == 0, done.stderr
    assert f"branches.{BRANCH}.1.0" in done.stdout and "multiplications" in done.stdout
    after = (project / "params.yaml").read_text(encoding="utf-8").splitlines()
    assert len([line for line in before if line not in after]) == 2  # algorithm and dtype
    assert "      algorithm: winograd_f43    # of most" in after
    step = read_steps(project)[0]
    assert (step["algorithm"], step["dtype"]) == ("winograd_f43", "float16") and step["rules"]
    assert all(
        rule["layers"][0].startswith(f"branches.{BRANCH}.") and "65,504" in rule["reason"] for rule in step["rules"]
    )


def test_a_dry_run_writes_nothing(project: Path) -> None:
    before = (project / "params.yaml").read_text(encoding="utf-8")
    done = run(project, "found", "--images", "1", "--dry-run")
    assert done.returncode == 0 and "nothing is written" in done.stdout, done.stderr
    assert (project / "params.yaml").read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("old", "new", "argv", "message"),
    [
        ("", "", ["found", "--images", "99"], "--images: expected 1 to 16, got 99"),
        ("", "", ["found", "--max-relative-error", "0"], "--max-relative-error: expected a share"),
        ("", "", ["absent"], "candidates: expected one of plain, found, got 'absent'"),
        ("", "", ["plain"], "candidates.plain.steps: expected a step of kind conv_policy, found none"),
        ("evalsets/scenes-calibration", "evalsets/scenes", ["found"], "expected pictures that no eval shows, got 300"),
        (
            "calibration_images: evalsets/scenes-calibration",
            "",
            ["found"],
            "products.people.calibration_images: expected an eval",
        ),
    ],
    ids=["images", "error", "absent", "no step", "evaluated", "no calibration"],
)
def test_what_it_cannot_do_is_one_line(project: Path, old: str, new: str, argv: list[str], message: str) -> None:
    """A policy fitted to the pictures that it is judged by would look better than it is."""
    path = project / "params.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8") if old else None
    before = path.read_text(encoding="utf-8")
    done = run(project, *argv)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    assert path.read_text(encoding="utf-8") == before
