"""Gate what is committed: no weights, no records, nothing is evaluated. For CI and for a clone.

    python -m scripts.gate_committed [--markdown FILE]

A release may go out when
1. DVC finds nothing out of date by dvc.lock: the committed results are of this code, these settings and this data;
2. the gate of every track of params.yaml passes on the committed verdict;
3. every track's release bundle is there, verifies, and is about that verdict.
DVC alone would not do: where data is missing it stops ahead of a gate that has to run, and it skips a stage whose
committed report was deleted. Ends with 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.digests import digest_file  # noqa: E402
from pipeline.errors import QuantgateError  # noqa: E402
from pipeline.files import write_text  # noqa: E402
from pipeline.gate.loosening import MANIFEST  # noqa: E402
from pipeline.gate.wording import escape_markdown, show_unprintable  # noqa: E402
from pipeline.params import load_params  # noqa: E402
from pipeline.record_files import read_record  # noqa: E402
from pipeline.release.manifest import Manifest  # noqa: E402
from pipeline.release.verification import verify_bundle  # noqa: E402
from pipeline.settings import RELEASES, REPORTS, TRACKS  # noqa: E402

DVC = (sys.executable, "-m", "dvc", "repro", "--allow-missing")
_STALE = re.compile(r"(?:Running stage|failed to reproduce) '([^']+)'")
_RUNS_HERE = re.compile(r"env|gate(?:_[a-z]+)?")  # stages that may be out of date in a clone


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: its name, whether it is right, and what it said."""

    name: str
    is_right: bool
    said: str


def run(*command: str) -> tuple[int, str]:
    """Run a command in the project; return its exit code and what it said."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout.strip()


def check_results() -> Check:
    """Ask DVC which stages would have to run, after reading this machine's libraries, which could make them all."""
    name = "results belong to this code and these settings"
    code, said = run(*DVC, "--single-item", "env")
    if code:
        return Check(name, False, said)
    code, said = run(*DVC, "--dry", "--keep-going")
    found = dict.fromkeys(_STALE.findall(said))
    if code and not found:
        return Check(name, False, said)
    if stale := [stage for stage in found if not _RUNS_HERE.fullmatch(stage)]:
        return Check(name, False, f"out of date: {', '.join(stale)}\nrun `make repro` where the weights are, and "
                                  "commit what it writes")  # fmt: skip
    return Check(name, True, "nothing is out of date")


def check_gate(track: str) -> Check:
    """Run the gate of a track on the committed verdict."""
    code, said = run(sys.executable, "-m", "stages.gate", *([] if track == "text" else [track]))
    return Check(f"{track}: gate", code == 0, said)


def check_release(track: str) -> Check:
    """Check the bundle of a track, and that it is about the committed verdict."""
    bundle, name = RELEASES[track], f"{track}: release"
    try:
        found = verify_bundle(bundle)
        problems = found.problems[:]
        if not problems and read_record(bundle / MANIFEST, Manifest).verdict_sha256 != digest_file(
                REPORTS[track] / "verdict.json"):
            problems.append(f"{bundle}: it is about another verdict than the committed one; run `dvc repro`")
    except (QuantgateError, OSError) as error:
        return Check(name, False, str(error))
    return Check(name, not problems, "\n".join(problems or found.notes))


def check_all() -> list[Check]:
    """Check everything; a release only where its gate passes, as there is none for another."""
    try:
        params = load_params()
    except QuantgateError as error:
        return [Check("settings", False, str(error))]
    checks = [check_results()]
    for track in TRACKS:
        if track == "text" or getattr(params, track) is not None:
            checks.append(check_gate(track))
            if checks[-1].is_right:
                checks.append(check_release(track))
    return checks


def render_markdown(checks: list[Check]) -> str:
    """Write the checks for a comment, wrong ones open and right ones folded; nothing in them can end its block."""
    wrong = [check.name for check in checks if not check.is_right]
    parts = ["## quantgate: " + (f"blocked by {escape_markdown(', '.join(wrong))}" if wrong else "pass")]
    for check in checks:
        said = show_unprintable(check.said, keep="\n").replace("```", "'''")
        parts.append(f"<details{'' if check.is_right else ' open'}><summary>{escape_markdown(check.name)}: "
                     f"{'pass' if check.is_right else '<b>blocked</b>'}</summary>\n\n```text\n{said}\n```\n</details>")
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    """Print every check, write them as Markdown where asked, and return 1 when one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gate_committed", description="Gate what is committed.")
    parser.add_argument("--markdown", type=Path, help="file for a comment")
    given = parser.parse_args(argv)
    checks = check_all()
    for check in checks:
        print(f"{'pass   ' if check.is_right else 'BLOCKED'}  {check.name}")
        print(show_unprintable("\n".join(f"    {line}" for line in check.said.split("\n")), keep="\n"))
    if given.markdown:
        write_text(given.markdown, render_markdown(checks))
    return 0 if all(check.is_right for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
