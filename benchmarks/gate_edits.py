"""Edit a clone in many ways and gate it each time: does `.ci/gate` stop what would ship results of something else?

    python -m benchmarks.gate_edits [NAME ...]

Makes a clone of the last commit in a temporary folder, as a runner has it: no weights, no records. For each edit it
prints the gate's exit code, what it blocked, and what `dvc repro --allow-missing --dry --keep-going` says. About half a
minute of CPU time an edit. `nothing` must pass first: commit what `make repro` wrote.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
Edit = Callable[[Path], None]
PARAMS, STAGES, LOCK = "params.yaml", "dvc.yaml", "dvc.lock"
AWQ = "awq-long-g32"
_TOLD = re.compile(r"^(?:Running stage|ERROR: ).*", re.MULTILINE)


def replace(name: str, was: str, now: str, *, behind: str = "") -> Edit:
    """Make the edit that replaces a text in a file, the first time that it stands behind another one."""

    def edit(root: Path) -> None:
        text = (root / name).read_text(encoding="utf-8")
        start = text.index(was, text.index(behind))
        (root / name).write_text(text[:start] + now + text[start + len(was) :], encoding="utf-8")

    return edit


def append(name: str, text: str = "# edited\n") -> Edit:
    """Make the edit that adds a line at the end of a file."""

    def edit(root: Path) -> None:
        (root / name).write_text((root / name).read_text(encoding="utf-8") + text, encoding="utf-8")

    return edit


def remove(name: str) -> Edit:
    """Make the edit that deletes a file or a folder."""
    return lambda root: shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()


def both(*edits: Edit) -> Edit:
    """Make several edits one."""

    def edit(root: Path) -> None:
        for each in edits:
            each(root)

    return edit


def forge(root: Path) -> None:
    """Write into dvc.lock what the edited dvc.yaml and the edited files say, as if every stage had run on them."""
    yaml = YAML(typ="safe")
    lock, stages = (yaml.load((root / name).read_text(encoding="utf-8"))["stages"] for name in (LOCK, STAGES))
    code, said = run(root, "sh", "-c", stages["env"]["cmd"])  # writes the digests that the others depend on
    assert code == 0, said
    for name, entry in lock.items():
        stage, _, key = name.partition("@")
        asked = stages.get(stage, {})
        entry["cmd"] = asked.get("do", asked).get("cmd", entry["cmd"]).replace("${key}", key)
        for path, watched in entry.get("params", {}).items():
            settings = yaml.load((root / path).read_text(encoding="utf-8"))
            watched |= {key: _look_up(settings, key, watched[key]) for key in watched}
        for output in entry["outs"] if stage == "env" else ():
            content = (root / output["path"]).read_bytes()
            output.update(md5=hashlib.md5(content, usedforsecurity=False).hexdigest(), size=len(content))
    (root / LOCK).write_text(json.dumps({"schema": "2.0", "stages": lock}), encoding="utf-8")


def _look_up(params: Any, key: str, default: Any) -> Any:
    """Return a setting by its dotted key; the default where it is gone, as of a candidate that dvc.lock still has."""
    for part in key.split("."):
        if not isinstance(params, dict) or part not in params:
            return default
        params = params[part]
    return params


def drop_stage(name: str) -> Edit:
    """Make the edit that takes a stage out of dvc.lock, or out of dvc.yaml."""
    return lambda root: _cut(root / name.partition(":")[0], name.partition(":")[2])


def _cut(path: Path, stage: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    start = lines.index(f"  {stage}:\n")
    end = next(
        (i for i in range(start + 1, len(lines)) if lines[i].strip() and not lines[i].startswith("   ")), len(lines)
    )
    path.write_text("".join(lines[:start] + lines[end:]), encoding="utf-8")


def drop_inputs(stage: str) -> Edit:
    """Make the edit that takes what stage env found of settings, code and cases from what a stage depends on."""
    watched = f'      params:\n        - build/env/inputs.json: ["{stage}.${{key}}"]\n'
    return replace(STAGES, watched, "", behind=f"  {stage}:\n")


def replace_digest(stage: str, part: str, path: str) -> Edit:
    """Make the edit that changes one digest in dvc.lock."""

    def edit(root: Path) -> None:
        text = (root / "dvc.lock").read_text(encoding="utf-8")
        start = 0
        for behind in (f"  {stage}:\n", f"    {part}:\n", f"path: {path}\n", "md5: "):
            start = text.index(behind, start) + len(behind)
        (root / "dvc.lock").write_text(text[:start] + "0" * 32 + text[start + 32 :], encoding="utf-8")

    return edit


GROUP = replace(PARAMS, "group_size: 32", "group_size: 128", behind=f"  {AWQ}:\n")
FROZEN = both(
    *(
        replace(STAGES, "    do:\n", "    do:\n      frozen: true\n", behind=f"  {name}:\n")
        for name in ("optimize", "compare", "release")
    )
)
REPORT = "        - reports/${key}: {cache: false, persist: true}\n"
EDITS: dict[str, Edit] = {
    "nothing": lambda root: None,
    # settings
    "serving.dtype": replace(PARAMS, "dtype: float32", "dtype: bfloat16", behind="serving:"),
    "serving.max_tokens": replace(PARAMS, "max_tokens: 64", "max_tokens: 65", behind="serving:"),
    f"candidates.{AWQ} group_size": GROUP,
    "optimize.num_threads": replace(PARAMS, "num_threads: 2", "num_threads: 1"),
    "evals.workflows.max_turns": replace(PARAMS, "max_turns: 16", "max_turns: 15"),
    "canary.num_prompts": replace(PARAMS, "num_prompts: 100", "num_prompts: 101"),
    "gate tolerance, stricter": replace(PARAMS, "overall: 0.03", "overall: 0.029", behind="task_completion_rate"),
    "shots num_inference_steps": replace(PARAMS, "num_inference_steps: 20", "num_inference_steps: 21"),
    "people batch_size": replace(PARAMS, "batch_size: 6 ", "batch_size: 5 ", behind="  people:\n"),
    "upscaler tiled-hann overlap": replace(
        PARAMS, "overlap: 0.125", "overlap: 0.25", behind="  tiled-hann:\n    product: upscaler"
    ),
    # code
    **{
        f"code {name}": append(name)
        for name in (
            "pipeline/products/text/evals/trajectories.py",
            "pipeline/gate/statistics.py",
            "pipeline/gate/decision.py",
            "pipeline/release/model_card.py",
            "pipeline/report/mlflow_runs/tracking.py",
            "pipeline/products/text/optimize/layers.py",
            "pipeline/products/images/rendering.py",
            "pipeline/products/vision/upscaling.py",
            "pipeline/products/text/serving/client.py",
            "stages/gate.py",
        )
    },
    # data
    "a case of evalsets/workflows": replace("evalsets/workflows/cases.jsonl", '"cluster"', ' "cluster"'),
    "weights models/agent": replace("models/agent/generation_config.json", "{", "{ "),
    # dvc.lock
    "lock: an out's digest": replace_digest(f"optimize@{AWQ}", "outs", f"build/agent/candidates/{AWQ}"),
    "lock: a dep's digest": replace_digest(f"evaluate@{AWQ}", "deps", f"build/agent/candidates/{AWQ}"),
    "lock: no compare": drop_stage("dvc.lock:compare@agent"),
    "lock: forged for group_size": both(GROUP, forge),
    # dvc.yaml
    "yaml: frozen, group_size": both(GROUP, FROZEN),
    "yaml: compare without its settings": drop_inputs("compare"),
    "yaml: evaluate without its code": both(
        drop_inputs("evaluate"), append("pipeline/products/text/evals/trajectories.py")
    ),
    "yaml: compare cmd echo": replace(STAGES, "python -m stages.compare ${key}\n", "echo\n"),
    "yaml: gate cmd echo": replace(STAGES, "python -m stages.gate ${key}\n", "echo\n"),
    "yaml: gate cmd echo, forged": both(replace(STAGES, "python -m stages.gate ${key}\n", "echo\n"), forge),
    "yaml: gate cmd no text": replace(STAGES, "python -m stages.gate ${key}\n", "true\n"),
    "yaml: env not always_changed": replace(STAGES, "    always_changed: true\n", ""),
    "yaml: no compare": drop_stage("dvc.yaml:compare"),
    "yaml: no report among outs": replace(STAGES, REPORT, ""),
    "yaml: broken": append(STAGES, "  x: [\n"),
    # what git keeps of a run
    "verdict edited": replace("reports/agent/verdict.json", '"outcome": "pass"', '"outcome":  "pass"'),
    "report deleted": remove("reports/agent/report.md"),
    "metrics edited": append(f"metrics/agent/{AWQ}.json", " "),
    "bundle params edited": append("release/agent/params.yaml"),
    "bundle deleted": remove("release/shots"),
    "bundle record edited": append("release/agent/evaluations/awq-long-g32/evaluation.json", " "),
}


def run(root: Path, *command: str) -> tuple[int, str]:
    """Run a command in the clone; return its exit code and what it said."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GITHUB_"))}
    kept |= {"DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}"}
    done = subprocess.run(
        command, cwd=root, env=kept, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout


def try_edit(root: Path, edit: Edit) -> dict[str, object]:
    """Edit a clean clone; return what the gate says, and which stages DVC would run or can't."""
    subprocess.run("git checkout -q . && git clean -qfdx -e .dvc", cwd=root, shell=True, check=True)
    edit(root)
    code, said = run(root, "python", "-m", "scripts.gate_committed")
    # what the gate ran left the digests of code and data, which DVC needs
    _, dry = run(root, "python", "-m", "dvc", "repro", "--allow-missing", "--dry", "--keep-going")
    blocked = re.findall(r"^BLOCKED  (.+)\n((?:    .*\n?)*)", said, re.MULTILINE)
    told = {name: "; ".join(line.strip() for line in lines.splitlines()) for name, lines in blocked}
    return {"exit": code, "blocked": told or said.splitlines()[-1], "dvc": _TOLD.findall(dry)}


def main(argv: list[str]) -> int:
    """Print a line of JSON for each edit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate_edits", description="Edit a clone and gate it.")
    parser.add_argument("names", nargs="*", help=", ".join(EDITS))
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="quantgate-edits-") as folder:
        root = Path(folder, "clone")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(root)], check=True)
        for name in given.names or EDITS:
            print(json.dumps({"edit": name} | try_edit(root, EDITS[name])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
