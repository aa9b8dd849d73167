"""One word finds a stage's file, its entry in dvc.yaml and what it depends on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.serving_records import ServingConfig
from pipeline.settings import TRACKS, name_stage
from pipeline.stage_code import NOT_A_STAGE, list_code, list_stages
from pipeline.text_params import ServingSettings
from tests.paths import ROOT

CODE_DIGESTS = "build/env/code.json"
MAX_STAGE_LINES = 60


def read_dvc_stages() -> dict[str, dict[str, Any]]:
    """Read dvc.yaml; a stage under `foreach` is its `do` part."""
    stages = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return {name: entry.get("do", entry) for name, entry in stages.items()}


DVC_STAGES = read_dvc_stages()


def _names(entries: list[Any]) -> list[str]:
    return [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]


def _read_command(stage: str) -> list[str]:
    """Return the words behind `python -m stages.` of a stage, the name of the file first."""
    return str(DVC_STAGES[stage]["cmd"]).removeprefix("python -m stages.").split()


def test_every_file_is_a_stage_and_every_stage_runs_a_file() -> None:
    assert {_read_command(stage)[0] for stage in DVC_STAGES} == set(list_stages(ROOT))


@pytest.mark.parametrize("stage", DVC_STAGES)
def test_command_runs_the_file_of_the_same_name(stage: str) -> None:
    """Of a stage that several tracks share: with the track behind it."""
    file, *words = _read_command(stage)
    track = words[0] if words and words[0] in TRACKS else "text"
    assert stage == name_stage(file.removesuffix("_network"), track)


@pytest.mark.parametrize("stage", DVC_STAGES)
def test_a_stage_of_a_track_reads_and_writes_that_track_alone(stage: str) -> None:
    """A block copied for another track and half edited would judge one product by the other's records."""
    track = next((track for track in TRACKS[1:] if stage.endswith(f"_{track}")), None)
    others = [name for name in TRACKS[1:] if name != track]
    text = str(DVC_STAGES[stage])
    if stage != "env":
        assert not [name for name in others if f"/{name}/" in text or f"{name}." in text or f"env/{name}" in text]


@pytest.mark.parametrize("stage", [stage for stage in DVC_STAGES if stage != "env"])
def test_a_stage_depends_on_its_own_code(stage: str) -> None:
    """On that of another, an edit goes unnoticed."""
    [code] = [entry for entry in DVC_STAGES[stage]["params"] if isinstance(entry, dict) and CODE_DIGESTS in entry]
    assert code[CODE_DIGESTS] == [_read_command(stage)[0]]


@pytest.mark.parametrize("stage", DVC_STAGES)
def test_nothing_is_listed_twice(stage: str) -> None:
    for section in ("deps", "outs", "metrics"):
        names = _names(DVC_STAGES[stage].get(section, []))
        assert len(names) == len(set(names)), f"{section} of {stage} in dvc.yaml"


def test_evaluate_watches_what_can_change_an_answer_and_nothing_else_of_serving() -> None:
    """Too few: answers of another setting are judged. Too many: a longer timeout costs every evaluation."""
    names = [name for name in _names(DVC_STAGES["evaluate"]["params"]) if name.startswith("serving")]
    shared = ServingSettings.model_fields.keys() & ServingConfig.model_fields.keys()
    assert sorted(names) == sorted(f"serving.{name}" for name in shared)


@pytest.mark.parametrize("stage", ["evaluate", "evaluate_images", "evaluate_network"])
def test_a_journal_is_kept_under_the_code_of_its_own_stage(stage: str) -> None:
    """Under that of another, a run that was killed and goes on after an edit would mix old cases with new."""
    [asked] = {name for path in list_code(stage, ROOT) if path.startswith("pipeline/") and path.endswith(".py")
               for name in re.findall(r'digest_code\("(\w+)"\)', (ROOT / path).read_text(encoding="utf-8"))}
    assert asked == stage


@pytest.mark.parametrize("stage", list_stages(ROOT))
def test_stage_file_stays_thin(stage: str) -> None:
    lines = (ROOT / "stages" / f"{stage}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_STAGE_LINES, "a stage reads, calls pipeline and writes; the work belongs in pipeline/"


def test_nothing_else_lies_among_the_stages() -> None:
    allowed = {*NOT_A_STAGE, *(f"{stage}.py" for stage in list_stages(ROOT))}
    assert {path.name for path in (ROOT / "stages").iterdir() if path.name != "__pycache__"} <= allowed


def test_the_last_release_outlives_a_run() -> None:
    """DVC deletes an output ahead of its stage, unless it persists: a release that fails would take the last one away,
    and with it what loosened settings are compared with."""
    outs = [out for stage in DVC_STAGES.values() for out in stage.get("outs", []) if "release/" in str(out)]
    assert len(outs) == len(TRACKS) and all(next(iter(out.values()))["persist"] for out in outs)
