"""Stages of a product whose checkpoint is a pinned model of a hub, in processes of their own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pipeline.records.digests import digest_checkpoint
from tests.fakes.fake_hub import REFERENCE, serve_hub
from tests.fakes.project_copy import ProjectCopy
from tests.paths import ROOT


def test_stages_download_it_once(tmp_path: Path) -> None:
    """As a user runs them: settings, preflight, digests and the candidate, in processes of their own."""
    project = ProjectCopy.make(tmp_path / "project")
    project.keep_product("agent")
    data = project.read_params()
    for candidate in data["candidates"].values():
        candidate["checkpoint"] = REFERENCE
    project.write_params(data)
    with serve_hub(ROOT / "models/agent", tmp_path / "unused") as hub:
        online = ("env", f"HF_ENDPOINT={hub.url}", "HF_HUB_OFFLINE=0", "TRANSFORMERS_OFFLINE=0")
        done = project.run(*online, sys.executable, "-m", "stages.env")
        assert done.returncode == 0, done.stdout
        hub.requests.clear()
        done = project.run(*online, sys.executable, "-m", "stages.optimize", "agent")
        assert done.returncode == 0, done.stdout
        assert hub.requests == []
    built = project.read_json("build/agent/candidates/agent/candidate.json")
    assert built["checkpoint"]["path"] == REFERENCE
    assert built["checkpoint"]["digest"] == digest_checkpoint(ROOT / "models/agent")
    shutil.rmtree(project.root / ".huggingface")
    done = project.run(sys.executable, "-m", "stages.env")
    assert done.returncode == 1 and "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set" in done.stdout.splitlines()[-1]
