"""Gate what is committed: no weights, no records, nothing is evaluated. For CI and for a clone.

    python -m scripts.gate_committed [--markdown FILE]

A release may go out when
1. DVC finds nothing out of date by dvc.lock: the committed results are of this code, these settings and this data;
2. the gate of every track of params.yaml passes on the committed verdict;
3. every track's release bundle is there, verifies, and is about that verdict; it is signed by the key in `release.pub`,
   where that file is committed;
4. in a pull request (GITHUB_BASE_REF names the branch it goes to): no setting is looser than at that branch's last
   release without its reason in `gate.loosened`, no release of that branch was deleted, and `release.pub` is its own.
DVC alone would not do: where data is missing it stops ahead of a gate that has to run, and it skips a stage whose
committed report was deleted. Ends with 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.digests import digest_file  # noqa: E402
from pipeline.errors import QuantgateError  # noqa: E402
from pipeline.files import write_text  # noqa: E402
from pipeline.gate.loosening import MANIFEST, compare_with_release, name_material  # noqa: E402
from pipeline.gate.verdicts import describe_policy  # noqa: E402
from pipeline.gate.wording import escape_markdown, show_unprintable  # noqa: E402
from pipeline.params import Params, get_track, load_params  # noqa: E402
from pipeline.record_files import read_record  # noqa: E402
from pipeline.release.manifest import Manifest  # noqa: E402
from pipeline.release.verification import verify_bundle  # noqa: E402
from pipeline.settings import RELEASES, REPORTS, TRACKS, Track  # noqa: E402

DVC = (sys.executable, "-m", "dvc", "repro", "--allow-missing")
KEY = Path("release.pub")
LOCK = Path("dvc.lock")
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


@contextmanager
def _keep_lock() -> Iterator[None]:
    """Leave dvc.lock as it was found: reading this machine's libraries writes them there."""
    found = LOCK.read_bytes() if LOCK.is_file() else None
    try:
        yield
    finally:
        if found is not None:
            LOCK.write_bytes(found)
        else:
            LOCK.unlink(missing_ok=True)


def check_results() -> Check:
    """Ask DVC which stages would have to run, after reading this machine's libraries, which could make them all."""
    name = "results belong to this code and these settings"
    with _keep_lock():
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
    """Check the bundle of a track, that it is about the committed verdict, and its signature where a key is kept."""
    bundle, name = RELEASES[track], f"{track}: release"
    try:
        found = verify_bundle(bundle, public_key=KEY if KEY.is_file() else None)
        problems = found.problems[:]
        if not problems and read_record(bundle / MANIFEST, Manifest).verdict_sha256 != digest_file(
                REPORTS[track] / "verdict.json"):
            problems.append(f"{bundle}: it is about another verdict than the committed one; run `dvc repro`")
    except (QuantgateError, OSError) as error:
        return Check(name, False, str(error))
    return Check(name, not problems, "\n".join(problems or found.notes))


def check_base(params: Params, base: str) -> Check:
    """Compare what is asked with the last releases on the branch a pull request goes to, which it can't rewrite."""
    name = f"nothing is looser than on {base} without a reason"
    code, _ = run("git", "rev-parse", "--verify", "--quiet", f"origin/{base}^{{commit}}")
    if code:
        return Check(name, False, f"origin/{base}: expected the branch that this goes to, found none; fetch it")
    problems = [problem for track in TRACKS if (problem := _find_loosening(params, track, f"origin/{base}"))]
    code, key = run("git", "show", f"origin/{base}:{KEY}")
    if not code and (not KEY.is_file() or KEY.read_text(encoding="utf-8").strip() != key):
        problems.append(f"{KEY}: expected the key that {base} has, found "
                        f"{'another' if KEY.is_file() else 'none'}; change it on {base} itself")
    return Check(name, not problems, "\n".join(problems) or "nothing is")


def _find_loosening(params: Params, track: str, base: str) -> str | None:
    path = RELEASES[track] / MANIFEST
    code, listed = run("git", "ls-tree", "--name-only", base, "--", path.as_posix())
    if not code and not listed:
        return None  # nothing was released there
    code, manifest = run("git", "show", f"{base}:{path.as_posix()}")
    if code:
        return f"{base}:{path}: expected the manifest of the last release, git can't read it: {manifest}"
    if not path.is_file():
        return f"{path}: {base} has it, and here it was deleted; run `git checkout {base} -- {path.parent}`"
    try:
        policy = describe_policy(get_track(params, track, kind=Track))
        own = read_record(path, Manifest)
        side, cases = own.reference, {name: kept.digest for name, kept in own.evalsets.items()}
        material = name_material(weights=side.weights_digest, cases=cases, serving=side.serving_digest,
                                 adapter=side.adapter_digest)  # fmt: skip
        compare_with_release(policy, manifest.encode(), f"{base}:{path}", material=material)
    except QuantgateError as error:
        return str(error)
    return None


def check_all() -> list[Check]:
    """Check everything; a release only where its gate passes, as there is none for another."""
    try:
        params = load_params()
    except QuantgateError as error:
        return [Check("settings", False, str(error))]
    checks = [check_results()]
    if base := os.environ.get("GITHUB_BASE_REF"):
        checks.append(check_base(params, base))
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
