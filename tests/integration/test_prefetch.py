"""`quantgate prefetch` and then `dvc repro` in copies of the project: the bytes of DVC alone, and no work twice.

The copies have the detector, two candidates and a few pictures.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalsets.seal import seal
from pipeline.evalsets.cards import CASES_FILE
from tests.fakes.project_copy import ProjectCopy, list_ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PRODUCT, CANDIDATES, NUM_CASES = "people", ("people", "people-channels-last"), 24
# of 32 bits: a CPU without AVX-512 takes minutes for 16
OTHER_STEPS = [{"kind": "conv_policy", "algorithm": "winograd_f43", "dtype": "float32", "rules": []}]
STAGES = [f"{stage}@{name}" for stage in ("optimize", "evaluate") for name in CANDIDATES]
MADE = Path("build") / PRODUCT
PREFETCH = (sys.executable, "-m", "pipeline", "prefetch", "--jobs", "2")
TIMES = {"seconds", "latency_s", "notes_sha256"}  # and what stands in files of notes


def make_copy(root: Path) -> ProjectCopy:
    """Copy the project, with one product, two candidates and a few pictures; nothing has run in it."""
    copy = ProjectCopy.make(root)
    (root / "dvc.lock").unlink(missing_ok=True)
    (root / "evalsets/made.yaml").unlink()  # its digests are those of whole evalsets
    copy.keep_product(PRODUCT)
    shutil.rmtree(root / "release")
    data = copy.read_params()
    product = data["products"][PRODUCT]
    product["release"] = [CANDIDATES[1]]
    product["gate"] = {
        "alpha": 0.05,
        "on_inconclusive": "warn",
        "tolerances": dict.fromkeys(product["gate"]["tolerances"], {"overall": 0.5}),
    }
    data["candidates"] = {name: data["candidates"][name] for name in CANDIDATES}
    copy.write_params(data)
    cases = root / "evalsets/scenes" / CASES_FILE
    cases.write_text("".join(cases.read_text(encoding="utf-8").splitlines(keepends=True)[:NUM_CASES]), encoding="utf-8")
    seal(cases.parent)
    return copy


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ProjectCopy:
    """A copy in which DVC made everything."""
    copy = make_copy(tmp_path_factory.mktemp("plain") / "project")
    copy.run_dvc("init", "--force", "--quiet")
    done = copy.run_dvc("repro", *STAGES)
    assert done.returncode == 0, done.stdout
    assert "prefetch" not in done.stdout
    return copy


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> ProjectCopy:
    """A copy in which a prefetch was killed once a candidate was made, and another one was not."""
    copy = make_copy(tmp_path_factory.mktemp("ahead") / "project")
    copy.run_dvc("init", "--force", "--quiet")
    start_and_kill(copy.root)
    return copy


def start_and_kill(root: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DVC_")}
    with subprocess.Popen(PREFETCH, cwd=root, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (root / MADE / "prefetched/optimize/people.json").is_file() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    wait_for_end(root)


def wait_for_end(root: Path) -> None:
    """Wait until no process works in a folder."""
    deadline = time.monotonic() + 30
    while any(is_inside(entry, root) for entry in Path("/proc").glob("[0-9]*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [entry.name for entry in Path("/proc").glob("[0-9]*") if is_inside(entry, root)]


def is_inside(process: Path, root: Path) -> bool:
    try:
        return Path(os.readlink(process / "cwd")) == root
    except OSError:
        return False


def read_results(root: Path) -> Iterator[tuple[str, Any]]:
    """Yield each file of the results: JSON without times, anything else as bytes."""
    for stage in ("candidates", "evaluations"):
        for path in sorted((root / MADE / stage).rglob("*")):
            if not path.is_file() or path.name == "scenes.json":
                continue
            text = path.read_bytes()
            name = path.relative_to(root).as_posix()
            if path.suffix == ".json":
                yield name, drop_times(json.loads(text))
            elif path.suffix == ".jsonl":
                yield name, [drop_times(json.loads(line)) for line in text.splitlines()]
            else:
                yield name, text


def drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_times(entry) for key, entry in value.items() if key not in TIMES}
    return [drop_times(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
def test_killed_and_started_again_it_makes_the_bytes_of_dvc_alone(plain: ProjectCopy, ahead: ProjectCopy) -> None:
    """In the order of a user's day: killed, again, a second time, DVC, and once more."""
    again = ahead.run(*PREFETCH)
    assert again.returncode == 0, again.stdout
    assert "people: optimize: kept from an earlier prefetch" in again.stdout
    done = ahead.run_dvc("repro", *STAGES)
    assert done.returncode == 0, done.stdout
    assert sorted(list_ran(done.stdout)) == sorted(["env", *STAGES])
    assert done.stdout.count("made ahead by `quantgate prefetch`, taken over") == len(STAGES)
    assert dict(read_results(ahead.root)) == dict(read_results(plain.root))
    nothing = ahead.run(*PREFETCH)
    assert "prefetch: 0 of 2 candidates to make" in nothing.stdout
    assert list_ran(ahead.run_dvc("repro", *STAGES).stdout) == ["env"]


def test_what_is_edited_after_it_is_made_by_dvc(ahead: ProjectCopy) -> None:
    """Else a candidate of other steps would be judged under this one's name."""
    data = ahead.read_params()
    candidate = data["candidates"][CANDIDATES[1]]
    candidate["steps"] = OTHER_STEPS
    ahead.write_params(data)
    made = ahead.run(*PREFETCH, CANDIDATES[1])
    assert made.returncode == 0, made.stdout
    candidate["steps"] = []
    ahead.write_params(data)
    done = ahead.run_dvc("repro", *STAGES)
    assert done.returncode == 0, done.stdout
    assert f"{CANDIDATES[1]}: made ahead by `quantgate prefetch`, of other inputs or damaged" in done.stdout
    assert ahead.read_json(f"{MADE}/candidates/{CANDIDATES[1]}/candidate.json")["steps"] == []


def test_a_whole_run_notes_what_it_makes_and_has_dvc_judge_at_once(ahead: ProjectCopy) -> None:
    """DVC started a process for each result, to take over what was there."""
    data = ahead.read_params()
    data["candidates"][CANDIDATES[1]]["steps"] = OTHER_STEPS
    ahead.write_params(data)
    done = ahead.run(sys.executable, "-m", "pipeline", "repro", PRODUCT, "--jobs", "2")
    assert done.returncode == 0, done.stdout
    assert f"\n{PRODUCT}: MLflow: " in done.stdout, "the product was judged beside the candidates"
    assert list_ran(done.stdout) == ["env"], "nothing else was left to run after them"
    made = ahead.read_json(f"{MADE}/candidates/{CANDIDATES[1]}/candidate.json")
    assert made["steps"][0]["algorithm"] == "winograd_f43"
    assert not [*(ahead.root / MADE / "prefetched").rglob("*.json")]
    assert list_ran(ahead.run_dvc("repro").stdout) == ["env"]
