"""Checks of what is asked of the gate, before any model runs: it can be proven, and was not loosened in silence.

Nor is a stage of dvc.yaml frozen, whose results DVC would keep whatever is asked.
"""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml import YAML

from pipeline.errors import SettingsError
from pipeline.gate.loosening import check_loosening
from pipeline.gate.plan import check_plan, plan_gate, read_last
from pipeline.gate.verdicts import describe_policy
from pipeline.params import Params, get_track
from pipeline.settings import TRACKS, Track
from pipeline.suite_sizes import read_sizes


def check_gates(params: Params, root: Path) -> list[str]:
    """Check the gate of every track; return a warning for each tolerance that can't be proven and need not be.

    Raises:
        SettingsError: a tolerance that must be proven can't be, a setting is looser than at the last release, or a
            stage is frozen.
    """
    warnings = []
    _check_frozen(root / "dvc.yaml")
    for track in [get_track(params, name, kind=Track) for name in TRACKS
                  if name == "text" or getattr(params, name) is not None]:  # fmt: skip
        check_loosening(describe_policy(track), root, material={})
        warnings += check_plan(track, plan_gate(track, read_sizes(track, root), read_last(track.name, root)))
    return warnings


def _check_frozen(path: Path) -> None:
    """Refuse a stage that DVC never runs, so that results of other settings would be judged."""
    stages = YAML(typ="safe").load(path.read_text(encoding="utf-8"))["stages"] if path.is_file() else {}
    frozen = [name for name, stage in stages.items() if stage.get("do", stage).get("frozen")]
    if frozen:
        raise SettingsError(f"{path}: stages.{frozen[0]}.frozen: expected a stage that runs when it is out of date, "
                            "got true; remove the line")
