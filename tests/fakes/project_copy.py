"""A copy of the project as a fresh clone has it, and commands that run there, offline."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ruamel.yaml import YAML

from scripts.repro_rejected import copy_project


@dataclass(frozen=True)
class ProjectCopy:
    """The copy, and the ways in which a user touches it."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Self:
        """Copy what git keeps of the project, and put it under git."""
        copy_project(root)
        copy = cls(root)
        copy.run("git", "init", "--quiet")
        return copy

    def read_params(self) -> dict[str, Any]:
        """Read params.yaml."""
        data: dict[str, Any] = YAML(typ="safe").load((self.root / "params.yaml").read_text(encoding="utf-8"))
        return data

    def write_params(self, data: dict[str, Any]) -> None:
        """Write params.yaml; JSON is YAML."""
        (self.root / "params.yaml").write_text(json.dumps(data, indent=2), encoding="utf-8")

    def keep_product(self, name: str) -> None:
        """Make it a project of one product, as docs/your-model.md says."""
        data = self.read_params()
        for other in data["products"].keys() - {name}:
            for folder in ("release", "reports", "metrics"):
                shutil.rmtree(self.root / folder / other, ignore_errors=True)
        candidates = {key: own for key, own in data["candidates"].items() if own["product"] == name}
        self.write_params({"products": {name: data["products"][name]}, "candidates": candidates})

    def read_json(self, path: str) -> Any:
        """Read a file of the copy."""
        return json.loads((self.root / path).read_text(encoding="utf-8"))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy with the interpreter of the tests first in PATH."""
        # without bytecode every stage spends three times as long on its imports
        dropped = ("DVC_", "GIT_", "MLFLOW_", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HOME": str(self.root / ".huggingface"),
            "DVC_SITE_CACHE_DIR": str(self.root / ".dvc/site"),
            "DVC_NO_ANALYTICS": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        return subprocess.run(
            command, cwd=self.root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run_dvc(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run DVC."""
        return self.run(sys.executable, "-m", "dvc", *words)


def list_ran(output: str) -> list[str]:
    """Return the stages that a `dvc repro` ran, or would run."""
    return re.findall(r"^Running stage '(.+)':$", output, re.MULTILINE)
