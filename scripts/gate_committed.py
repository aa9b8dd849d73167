"""Gate what is committed: no weights, no records, nothing is evaluated. For CI and for a clone.

    python -m scripts.gate_committed [--markdown FILE]

A release may go out when
1. no stage is out of date by dvc.lock: the committed results are of this code, these settings and this data;
2. the gate of every product of params.yaml passes on the committed verdict;
3. every product's release bundle is there, verifies, and is about that verdict, these settings, weights and cases;
   it is signed by the key in `release.pub`, where that file is committed;
4. in a pull request (GITHUB_BASE_REF names the branch it goes to): no setting is looser than at that branch's last
   release without its reason in `gate.loosened`, no release of that branch was deleted, and `release.pub` is its own.
DVC alone would not do: where data is missing it stops ahead of a gate that has to run, and it skips a stage whose
committed report was deleted. Ends with 1 when anything is wrong, or when nobody can say.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.errors import QuantgateError  # noqa: E402
from pipeline.evalsets.cards import load_evalset  # noqa: E402
from pipeline.gate.loosening import MANIFEST, compare_with_release, name_material  # noqa: E402
from pipeline.gate.verdicts import VERDICT_FILE, build_policy  # noqa: E402
from pipeline.gate.wording import escape_markdown, show_unprintable  # noqa: E402
from pipeline.products.params import Params, load_params  # noqa: E402
from pipeline.products.prefetch import lock_project  # noqa: E402
from pipeline.products.vision.settings import VisionProduct  # noqa: E402
from pipeline.records.digests import digest_file  # noqa: E402
from pipeline.records.files import write_text  # noqa: E402
from pipeline.records.record_files import read_record  # noqa: E402
from pipeline.release.manifest import Manifest  # noqa: E402
from pipeline.release.recipe import find_other_material, find_other_recipe  # noqa: E402
from pipeline.release.verification import verify_bundle  # noqa: E402
from pipeline.running.staleness import find_stale, read_commands  # noqa: E402
from pipeline.settings.base import RELEASE, Product  # noqa: E402

KEY = Path("release.pub")
ENV_FILES = Path("build/env")
ENV = "env"  # the stage that reads code and libraries, which other stages are compared with
_ANNOTATIONS = ("::error file=", "::warning file=")  # the stage writes out what others' names say of this kind
JUDGING = ("compare", "gate", "release")  # stages that every product has


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: its name, whether it is right, what it said, and GitHub's commands in that."""

    name: str
    is_right: bool
    said: str
    annotations: tuple[str, ...] = ()


def run(*command: str) -> tuple[int, str]:
    """Run a command in the project; return its exit code and what it said."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout.strip()


def check_results(products: Sequence[str], *, blocked: Collection[str] = ()) -> Check:
    """Say which stages would have to run, after reading this machine's libraries, which could make them all.

    Args:
        products: that the project has.
        blocked: those whose gate does not pass: their last release is another one, as it has to be.
    """
    name = "results belong to this code and these settings"
    gates = [f"gate@{product}" for product in products]
    try:
        commands = read_commands(Path())
        with lock_project():  # a run beside this one has its locks there
            shutil.rmtree(ENV_FILES, ignore_errors=True)  # none that somebody committed stands for this code's own
        for command in commands.get(ENV, [f"echo dvc.yaml: expected a stage {ENV}, found none; exit 1"]):
            code, said = run("sh", "-c", command)
            if code:
                return Check(name, False, f"stage {ENV} ended with {code}\n{said}")
        stale = find_stale(Path(), runs_here={ENV, *gates})
        for product in blocked:
            stale.pop(f"release@{product}", None)
    except QuantgateError as error:
        return Check(name, False, str(error))
    lines = [f"out of date: {', '.join(stale)}"] if stale else []
    lines += [f"{stage}: {'; '.join(problems)}" for stage, problems in stale.items() if problems]
    asked = {f"{stage}@{product}": f"python -m stages.{stage} {product}" for product in products for stage in JUDGING}
    if Path("stages").is_dir():  # the project's own, whose digests nothing else can tell
        asked[ENV] = f"python -m stages.{ENV}"
    lines += _find_other_commands(commands, asked)
    if not lines:
        return Check(name, True, "nothing is out of date")
    return Check(name, False, "\n".join([*lines, "run `make repro` where the weights are, and commit what it writes"]))


def _find_other_commands(commands: Mapping[str, list[str]], asked: Mapping[str, str]) -> list[str]:
    """Return the stages that are not what they have to be, whatever dvc.lock says: those that judge, and env."""
    return [
        f"dvc.yaml: {stage}.cmd: expected {command!r}, got {'; '.join(commands.get(stage, ['no such stage']))!r}"
        for stage, command in asked.items()
        if commands.get(stage) != [command]
    ]


def check_gate(product: str) -> Check:
    """Run the gate of a product on the committed verdict; what it tells GitHub is handed on."""
    command = (sys.executable, "-m", "stages.gate", product)
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    lines = done.stdout.splitlines()
    told = tuple(line for line in lines if line.startswith(_ANNOTATIONS))
    said = "\n".join([*(line for line in lines if line not in told), done.stderr]).strip()
    return Check(f"{product}: gate", done.returncode == 0, said, told)


def check_release(product: Product) -> Check:
    """Check the bundle of a product, that it is about what is committed beside it, and its signature where a key is."""
    bundle, name = RELEASE / product.name, f"{product.name}: release"
    try:
        found = verify_bundle(bundle, public_key=KEY if KEY.is_file() else None)
        problems = found.problems or _find_other_release(bundle, product)
    except (QuantgateError, OSError) as error:
        return Check(name, False, str(error))
    return Check(name, not problems, "\n".join(problems or found.notes))


def _find_other_release(bundle: Path, product: Product) -> list[str]:
    """Return in what a bundle that verifies differs from the committed verdict, settings, weights and cases."""
    manifest = read_record(bundle / MANIFEST, Manifest)
    problems = []
    if manifest.verdict_sha256 != digest_file(product.reports / VERDICT_FILE):
        problems.append(f"{bundle}: it is about another verdict than the committed one; run `dvc repro`")
    folders = {name: Path(folder) for name, e in product.evals.items() if (folder := getattr(e, "evalset", None))}
    cases = {name: load_evalset(folder).digest for name, folder in folders.items() if folder.is_dir()}
    adapter = Path(product.adapter) if isinstance(product, VisionProduct) else None
    problems += find_other_recipe(bundle, product)
    return problems + find_other_material(manifest, Path(), cases=cases, adapter=adapter)


def check_base(params: Params, base: str) -> Check:
    """Compare what is asked with the last releases on the branch a pull request goes to, which it can't rewrite."""
    name = f"nothing is looser than on {base} without a reason"
    code, _ = run("git", "rev-parse", "--verify", "--quiet", f"origin/{base}^{{commit}}")
    if code:
        return Check(name, False, f"origin/{base}: expected the branch that this goes to, found none; fetch it")
    problems = [
        problem for product in params.products.values() if (problem := _find_loosening(product, f"origin/{base}"))
    ]
    problems += _list_abandoned(params, base)
    code, key = run("git", "show", f"origin/{base}:{KEY}")
    if not code and (not KEY.is_file() or KEY.read_text(encoding="utf-8").strip() != key):
        problems.append(
            f"{KEY}: expected the key that {base} has, found "
            f"{'another' if KEY.is_file() else 'none'}; change it on {base} itself"
        )
    return Check(name, not problems, "\n".join(problems) or "nothing is")


def _list_abandoned(params: Params, base: str) -> list[str]:
    """List the releases of a branch whose product has another name or is no more: under a new one nothing is pinned."""
    code, listed = run("git", "ls-tree", "-r", "--name-only", f"origin/{base}", "--", RELEASE.as_posix())
    if code:
        return [f"origin/{base}:{RELEASE}: expected the releases of that branch, git can't list them: {listed}"]
    manifests = [Path(line) for line in listed.splitlines() if Path(line).match(f"{RELEASE.as_posix()}/*/{MANIFEST}")]
    return [
        f"origin/{base}:{path}: expected a product {path.parent.name!r} in params.yaml, as it was released, "
        f"found none; remove or rename a product on {base} itself"
        for path in manifests
        if path.parent.name not in params.products
    ]


def _find_loosening(product: Product, base: str) -> str | None:
    path = RELEASE / product.name / MANIFEST
    code, listed = run("git", "ls-tree", "--name-only", base, "--", path.as_posix())
    if not code and not listed:
        return None  # nothing was released there
    code, manifest = run("git", "show", f"{base}:{path.as_posix()}")
    if code:
        return f"{base}:{path}: expected the manifest of the last release, git can't read it: {manifest}"
    if not path.is_file():
        return f"{path}: {base} has it, and here it was deleted; run `git checkout {base} -- {path.parent}`"
    try:
        policy = build_policy(product)
        own = read_record(path, Manifest)
        side, cases = own.reference, {name: kept.digest for name, kept in own.evalsets.items()}
        material = name_material(
            weights=side.weights_digest, cases=cases, serving=side.serving_digest, adapter=side.adapter_digest
        )
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
    gates = {name: check_gate(name) for name in params.products}
    blocked = [name for name, check in gates.items() if not check.is_right]
    checks = [check_results(list(params.products), blocked=blocked)]
    if base := os.environ.get("GITHUB_BASE_REF"):
        checks.append(check_base(params, base))
    for name, check in gates.items():
        checks += [check, check_release(params.products[name])] if check.is_right else [check]
    return checks


def render_markdown(checks: list[Check]) -> str:
    """Write the checks for a comment, wrong ones open and right ones folded; nothing in them can end its block."""
    wrong = [check.name for check in checks if not check.is_right]
    parts = ["## quantgate: " + (f"blocked by {escape_markdown(', '.join(wrong))}" if wrong else "pass")]
    for check in checks:
        said = show_unprintable(check.said, keep="\n").replace("```", "'''")
        parts.append(
            f"<details{'' if check.is_right else ' open'}><summary>{escape_markdown(check.name)}: "
            f"{'pass' if check.is_right else '<b>blocked</b>'}</summary>\n\n```text\n{said}\n```\n</details>"
        )
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    """Print every check, write them as Markdown where asked, and return 1 when one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gate_committed", description="Gate what is committed.")
    parser.add_argument("--markdown", type=Path, help="file for a comment")
    given = parser.parse_args(argv)
    if given.markdown and given.markdown.is_dir():
        parser.error(f"--markdown: expected a file, {str(given.markdown)!r} is a folder; name a file in it")
    checks = check_all()
    for check in checks:
        print(f"{'pass   ' if check.is_right else 'BLOCKED'}  {check.name}")
        print(show_unprintable("\n".join(f"    {line}" for line in check.said.split("\n")), keep="\n"))
        for annotation in check.annotations:
            print(annotation)
    if given.markdown:
        write_text(given.markdown, render_markdown(checks))
    return 0 if all(check.is_right for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
