"""The command `quantgate`: the gate on records of others and of a project, the run of its stages, and a start.

    quantgate compare REFERENCE CANDIDATE [--metric NAME] [--tolerance 0.03] ...
    quantgate gate [PRODUCT]
    quantgate repro [PRODUCT ...] [--jobs 4]
    quantgate prefetch [PRODUCT|CANDIDATE ...] [--jobs 4]
    quantgate init NAME --kind text --checkpoint FOLDER [--remove-shipped]
    quantgate --version

`python -m pipeline` is the same in a clone. `repro` ends with 0, with 255 as `dvc repro` does where a stage or a gate
stopped it, or with 1 where a candidate that was evaluated ahead of DVC did. Exit codes of `compare` and `gate`:

     0  pass, or inconclusive where that does not block
    10  inconclusive
    20  fail (and what gains nothing, where speed is all that it is there for)
    30  refused: the evidence is missing or not fit to be judged
     1  no verdict: a wrong option, a wrong setting, or a crash

The one module of the library with arguments and exit codes; imports neither torch nor DVC.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from pipeline.errors import EvidenceError, QuantgateError, SettingsError
from pipeline.gate.standing import read_judgement
from pipeline.gate.verdicts import Judgement, blocking_verdicts
from pipeline.gate.wording import use_metrics
from pipeline.products import KINDS
from pipeline.products.params import choose_product, load_params
from pipeline.records.plain_text import format_line
from pipeline.report.terminal import render_gate
from pipeline.settings.base import Product, Tier

EXIT_CODES = {"pass": 0, "inconclusive": 10, "refused": 30, "fail": 20, "no gain": 20}  # the worst is last
_PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"  # of a clone
REFUSED, NO_VERDICT, INTERRUPTED = EXIT_CODES["refused"], 1, 130


class _Parser(argparse.ArgumentParser):
    """Tells a wrong option as every other mistake of a user: in one line, by the exit code for no verdict."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see `{self.prog} --help`")


class _ShowVersion(argparse.Action):
    """Looks the version up when it is asked for, and not at every start."""

    def __call__(self, *_: object) -> NoReturn:
        print(f"quantgate {find_version()}")
        raise SystemExit(0)


def find_version() -> str:
    """Return the version: of this clone, else of the installed package; "unknown" where neither tells."""
    import tomllib
    from importlib import metadata

    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "quantgate":
            return str(project["version"])
    try:
        return metadata.version("quantgate")
    except metadata.PackageNotFoundError:
        return "unknown"


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        options = _parse(argv)
        code: int = options.run(options)
        return code
    except EvidenceError as error:
        print(f"quantgate: refused: {format_line(str(error))}", file=sys.stderr)
        return REFUSED
    except (QuantgateError, OSError) as error:
        print(f"quantgate: {format_line(str(error))}", file=sys.stderr)
        return NO_VERDICT
    except KeyboardInterrupt:
        print("quantgate: interrupted", file=sys.stderr)
        return INTERRUPTED


def _show(text: str) -> None:
    """Print what was found; a reader that has gone, as `head` does, changes neither exit code nor files."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def choose_exit_code(judgement: Judgement) -> int:
    """Return the exit code of a judgement: that of the worst verdict that blocks."""
    order = list(EXIT_CODES)
    outcomes = [verdict.outcome for verdict in blocking_verdicts(judgement)]
    return EXIT_CODES[max(outcomes, key=order.index, default="pass")]


def gate(options: argparse.Namespace) -> int:
    """Print what the stage `gate` prints; the marker of a pass is the stage's alone."""
    product = choose_product(load_params(), options.product, kind=Product)
    with use_metrics(product.metrics):
        judgement, are_here = read_judgement(product, KINDS[product.kind].get_auditor(), Path())
        _show(render_gate(judgement, are_here=are_here))
    return choose_exit_code(judgement)


def prefetch(options: argparse.Namespace) -> int:
    """Make and evaluate what is out of date side by side, for `dvc repro` to take over."""
    from pipeline.products.prefetch import prefetch as make

    gc.enable()
    make(options.names, None if options.jobs == "auto" else _count("--jobs", options.jobs))
    return 0


def init(options: argparse.Namespace) -> int:
    """Start a product in params.yaml, and say what to do next."""
    from pipeline.products.starting import init_product

    given = {name: value for name in _list_start_options() if (value := getattr(options, name)) is not None}
    lines = init_product(
        options.name,
        options.kind,
        options.checkpoint,
        given,
        root=Path(),
        remove_shipped=options.remove_shipped,
    )
    _show("\n".join(lines))
    return 0


def _list_start_options() -> dict[str, str]:
    """Return the options that a kind has beside those of every kind, with their help."""
    return {name: f"of kind {own}: {text}" for own, kind in KINDS.items() for name, text in kind.start_options.items()}


def repro(options: argparse.Namespace) -> int:
    """Run every stage that is out of date, candidates side by side; return the exit code of the last `dvc repro`."""
    from pipeline.products.repro import repro as run_all

    gc.enable()
    return run_all(options.names, None if options.jobs == "auto" else _count("--jobs", options.jobs))


def _count(option: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise SettingsError(f"{option}: expected auto, or how many candidates at once, such as 4, got {value!r}")
    return int(value)


def compare(options: argparse.Namespace) -> int:
    """Judge the candidate's outcomes against the reference's, and print the verdict."""
    from pipeline.outcomes.judging import judge_outcomes
    from pipeline.outcomes.rendering import render_outcomes
    from pipeline.records.record_files import write_record

    _check_outputs(options)
    reference, candidate = _read_sides(options)
    rules = _read_rules(options, reference, candidate)
    with use_metrics(rules.definitions):
        compared = judge_outcomes(reference, candidate, rules)
        judgement = compared.judgement
        _show(render_outcomes(judgement, reference, rules))
        _write_forms(compared, options)
    if options.json:
        write_record(options.json, judgement)
    return choose_exit_code(judgement)


def _write_forms(compared: Any, options: argparse.Namespace) -> None:
    """Write the judgement in the forms that were asked for."""
    from pipeline.records.files import write_text
    from pipeline.report.explain import explain_release
    from pipeline.report.github import render_summary
    from pipeline.report.html import render_html
    from pipeline.report.junit import render_junit

    judgement = compared.judgement
    if options.junit:
        write_text(options.junit, render_junit(judgement))
    if options.html or options.summary:
        explanation = explain_release(compared)
        if options.html:
            write_text(options.html, render_html(judgement, explanation, {}))
        if options.summary:
            _write_summary(options.summary, render_summary(judgement, explanation))


def _write_summary(path: Path, text: str) -> None:
    """Write a summary; to that of the present step of GitHub it is added, which other commands write to as well."""
    from pipeline.records.files import write_text

    if os.path.realpath(path) == os.path.realpath(os.environ.get("GITHUB_STEP_SUMMARY") or os.devnull):
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    else:
        write_text(path, text)


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse to write over what is read, or twice to one file."""
    inputs = (options.reference, options.candidate, options.policy)
    taken = {os.path.realpath(file): "read" for path in inputs if path for file in _list_read(path)}
    for name in ("json", "html", "junit", "summary"):
        path = getattr(options, name)
        if path and (use := taken.get(os.path.realpath(path))):
            raise SettingsError(f"--{name}: expected a file of its own, {str(path)!r} is {use}; name another")
        if path and path.is_dir():
            raise SettingsError(f"--{name}: expected a file, {str(path)!r} is a folder; name a file in it")
        if path:
            taken[os.path.realpath(path)] = f"written as --{name}"


def _list_read(path: Path) -> list[Path]:
    from pipeline.outcomes.registry import list_files

    try:
        return [path, *list_files(path)]
    except (EvidenceError, OSError):
        return [path]  # what is wrong with it is told when it is read


def _read_sides(options: argparse.Namespace) -> Any:
    from pipeline.outcomes.cases import Grouping
    from pipeline.outcomes.pools import pool_sides
    from pipeline.outcomes.registry import match_names, read_paired_table, read_side

    grouping = Grouping(options.cluster_by, tuple(options.buckets_by))
    if options.candidate is None:
        return read_paired_table(options.reference, grouping)
    if os.path.realpath(options.reference) == os.path.realpath(options.candidate):
        raise SettingsError(
            f"{options.candidate} is both reference and candidate; a comparison with itself proves nothing"
        )
    sides = match_names(read_side(options.reference, grouping), read_side(options.candidate, grouping))
    pools = {name: names.split(",") for name, names in _read_pairs("--pool", options.pool).items()}
    return pool_sides(*sides, pools, have_own_clusters=grouping.cluster is None) if pools else sides


def _read_rules(options: argparse.Namespace, reference: Any, candidate: Any) -> Any:
    from pipeline.outcomes.rules import Asked, load_rules, plan_rules

    better = {name: _direction(name, value) for name, value in _read_pairs("--better", options.better).items()}
    given = {
        key: value
        for key in ("tolerance", "tier", "alpha", "on_inconclusive")
        if (value := getattr(options, key)) is not None
    }
    if options.metric:
        given["metrics"] = tuple(options.metric)
    if options.bucket:
        given["buckets"] = {
            name: _number(f"--bucket {name}", value) for name, value in _read_pairs("--bucket", options.bucket).items()
        }
    if options.accept_gain:
        given["accept_gain"] = _read_pairs("--accept-gain", options.accept_gain, first=True, value="REASON")
    if options.policy is None:
        if options.product:
            raise SettingsError("--product: expected --policy beside it, whose products it chooses from, found none")
        return plan_rules(Asked(better=better, **given), reference, candidate)
    if given:
        raise SettingsError(f"--policy says all that is asked: expected no {', '.join(sorted(given))} beside it")
    return load_rules(options.policy, better, reference, candidate, product=options.product)


def _read_pairs(option: str, given: Sequence[str], *, first: bool = False, value: str = "VALUE") -> dict[str, str]:
    """Split each NAME=VALUE at its last equals sign, or at its first where a value may hold one."""
    pairs = {}
    for text in given:
        name, sign, right = text.partition("=") if first else text.rpartition("=")
        if not sign or not name:
            raise SettingsError(f"{option}: expected NAME={value}, got {text!r}")
        if name in pairs:
            raise SettingsError(f"{option}: {name} is there twice; remove one")
        pairs[name] = right
    return pairs


def _number(option: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise SettingsError(f"{option}: expected a number, got {value!r}") from None


def _direction(name: str, value: str) -> Literal["higher", "lower"]:
    if value not in ("higher", "lower"):
        raise SettingsError(f"--better {name}: expected higher or lower, got {value!r}")
    return "higher" if value == "higher" else "lower"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    from pipeline.outcomes.examples import EXAMPLES

    about = (__doc__ or "").split("\n\n")
    parser = _Parser(
        prog="quantgate",
        description=about[0],
        epilog="\n\n".join([EXAMPLES.rstrip(), *about[2:4]]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version, and end")
    commands = parser.add_subparsers(required=True, metavar="{compare,gate,repro,prefetch,init}")
    _add_compare(commands.add_parser("compare", help="judge records that lm-eval, inspect_ai or anything else made"))
    own = commands.add_parser("gate", help="tell the verdict on this project's release, as the stage gate does")
    own.add_argument("product", nargs="?", metavar="PRODUCT", help="of params.yaml; needed where there are several")
    own.set_defaults(run=gate)
    whole = commands.add_parser("repro", help="run every stage that is out of date, to the verdict, in one view")
    whole.description = (
        "Candidates as `quantgate prefetch` makes them, each product judged as soon as its own are made; then "
        "`dvc repro`, whose exit code is this one's."
    )
    whole.add_argument("names", nargs="*", metavar="PRODUCT", help="of params.yaml; none: all")
    whole.set_defaults(run=repro)
    ahead = commands.add_parser("prefetch", help="make and evaluate what is out of date, several candidates at once")
    ahead.description = "Results are kept for `dvc repro`, which takes them over, checks and judges."
    ahead.add_argument("names", nargs="*", metavar="PRODUCT|CANDIDATE", help="of params.yaml; none: all")
    for command in (whole, ahead):
        command.add_argument("--jobs", default="auto", metavar="N", help="candidates at once (auto: product's workers)")
    ahead.set_defaults(run=prefetch)
    _add_init(commands.add_parser("init", help="start a product of your own in params.yaml, with example cases"))
    return parser.parse_args(argv)


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.description = "Everything is checked before anything is written; `git diff` shows what was."
    parser.add_argument("name", metavar="NAME", help="of the product: lower-case letters, digits and dashes")
    parser.add_argument("--kind", required=True, metavar="|".join(KINDS))
    parser.add_argument(
        "--checkpoint", required=True, metavar="FOLDER", help="of the project, or, for kind text, of a hub (hf://...)"
    )
    for name, text in _list_start_options().items():
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument("--remove-shipped", action="store_true", help="take the shipped products out of the project")
    parser.set_defaults(run=init)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    from pipeline.outcomes.examples import EXAMPLES

    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Judge a candidate's outcomes against the reference's: lm-eval's samples_*.jsonl, logs of\n"
        "inspect_ai, tables (.csv, .tsv, .jsonl), quantgate's own case records, or folders of them."
    )
    parser.set_defaults(run=compare)
    add = parser.add_argument
    add("reference", type=Path, metavar="REFERENCE", help="a file or folder; alone, a table of both sides")
    add("candidate", type=Path, metavar="CANDIDATE", nargs="?")
    add("--metric", action="append", metavar="[EVAL/]NAME", help="to gate; needed where there are several; repeatable")
    add("--tolerance", type=float, help="the loss that is tolerated: 0.03 of a rate is 3 points, the default")
    add("--bucket", action="append", default=[], metavar="NAME=TOLERANCE", help="gate a bucket too; repeatable")
    add("--tier", choices=get_args(Tier), help="of the metrics (critical)")
    add("--alpha", type=float, help="one-sided error rate of the verdict (0.05)")
    add("--on-inconclusive", choices=("block", "warn"), help="(block)")
    add("--policy", type=Path, metavar="FILE", help="instead of the above: params.yaml, or YAML with its key `gate`")
    add("--product", metavar="NAME", help="whose gate in params.yaml is the policy, where it has several products")
    add("--better", action="append", default=[], metavar="NAME=higher|lower", help="direction of a metric; repeatable")
    add(
        "--accept-gain",
        action="append",
        default=[],
        metavar="NAME=REASON",
        help="a gain beyond the tolerance passes, and the reason is printed; repeatable",
    )
    add("--cluster-by", metavar="FIELD", help="of the document, metadata or table: equal values are one cluster")
    add("--buckets-by", action="append", default=[], metavar="FIELD", help="likewise, buckets FIELD/value; repeatable")
    add(
        "--pool",
        action="append",
        default=[],
        metavar="NAME=EVAL,EVAL",
        help="judge evals as one, each a bucket of it; shell patterns, as mmlu=mmlu_*; repeatable",
    )
    add("--json", type=Path, metavar="FILE", help="write the judgement")
    add("--html", type=Path, metavar="FILE", help="write it as one page, with the cases that flipped side by side")
    add("--junit", type=Path, metavar="FILE", help="write it as JUnit XML")
    add("--summary", type=Path, metavar="FILE", help="write it as Markdown, for the summary of a CI step")


def run() -> NoReturn:
    """Run the command with the arguments of this process, and end it."""
    gc.disable()  # it ends within seconds
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
