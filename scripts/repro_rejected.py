"""Show a failing gate: release one named candidate in a temporary copy of the project.

    python scripts/repro_rejected.py gptq-short

The copy holds the working tree's files and shares its DVC cache, so what is already evaluated is
not evaluated again: only compare, track and gate run. Nothing in the working tree changes. Ends
with the exit code of `dvc repro`, which is not 0 when the gate does its work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.running.made_files import list_made_files  # noqa: E402


def copy_project(target: Path) -> None:
    """Copy tracked files, new ones that git does not ignore, and those that a script made, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    made = [path.relative_to(ROOT).as_posix() for path in list_made_files(ROOT)]
    for name in filter(None, [*listed.split("\0"), *made]):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def find_cache(dvc: tuple[str, ...]) -> str:
    """Ask DVC where this project keeps its cache."""
    asked = subprocess.run([*dvc, "cache", "dir"], cwd=ROOT, check=True, capture_output=True, text=True)
    return asked.stdout.strip()


def set_release(params: Path, candidate: str) -> str:
    """Rewrite `release:` of a candidate's product in params.yaml, keeping comments; return the product's name."""
    yaml = YAML()
    data = yaml.load(params.read_text(encoding="utf-8"))
    if candidate not in data["candidates"]:
        sys.exit(f"{candidate}: expected one of {', '.join(data['candidates'])}")
    product = data["candidates"][candidate]["product"]
    data["products"][product]["release"] = [candidate]
    with params.open("w", encoding="utf-8") as file:
        yaml.dump(data, file)
    return str(product)


def main(candidate: str) -> int:
    """Run `dvc repro` with `candidate` as the release; return its exit code."""
    # DVC takes a root that is already set for that of an outer run
    environment = {name: value for name, value in os.environ.items() if name not in ("DVC_ROOT", "DVC_EXP_NAME")}

    def run(*command: str) -> int:
        return subprocess.run(command, cwd=copy, env=environment).returncode

    with tempfile.TemporaryDirectory(prefix="quantgate-rejected-") as folder:
        copy = Path(folder)
        copy_project(copy)
        dvc = (sys.executable, "-m", "dvc")
        run("git", "init", "--quiet")
        run(*dvc, "cache", "dir", "--local", find_cache(dvc))
        run(*dvc, "checkout", "--quiet", "--allow-missing")
        product = set_release(copy / "params.yaml", candidate)
        print(f"releasing {candidate!r} in a temporary copy; this project stays as it is", flush=True)
        return run(*dvc, "repro", f"gate@{product}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/repro_rejected.py <candidate>")
    sys.exit(main(sys.argv[1]))
