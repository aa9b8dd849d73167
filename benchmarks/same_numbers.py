"""Are the numbers of two commits the same? For a change that should move none: layout, names, speed.

    python -m benchmarks.same_numbers OLD [NEW] [--product OLD=NEW ...] [--candidate [PRODUCT/]OLD=NEW ...]

OLD and NEW are commits, or folders in which a commit has run; NEW is the working tree where it is left out. Compares
every value of every product's verdict, byte for byte as JSON has them. Not compared: fingerprints and digests, which
hold paths and names, what was timed, and what was asked. Prints a row a product, then each value that differs; ends
with 1 when one does. Two processors round sums otherwise: a number that differs by less than a part in 10**9 is
counted as rounding, and not printed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.records.reasons import Reason

DIGESTS = ("reference_fingerprint", "fingerprint", "behaviour")
TIMED = ("seconds", "speed", "gain", "total", "latency_ms")
RENAMED = ("policy",)  # what was asked, in which names and sections stand
_ROUNDING = {"rel_tol": 1e-9, "abs_tol": 1e-12}
_ABSENT = "nothing"


def read(commit: str, path: str) -> str | None:
    """Return a file of a commit, or of a folder; None: it has no such file."""
    if Path(commit).is_dir():
        return Path(commit, path).read_text(encoding="utf-8") if Path(commit, path).is_file() else None
    done = subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def read_verdict(commit: str, product: str) -> dict[str, Any]:
    """Return a product's verdict."""
    for path in (f"reports/{product}/verdict.json", *(["reports/verdict.json"] if product == "text" else [])):
        if text := read(commit, path):
            return dict(json.loads(text))
    sys.exit(f"{commit}: no verdict of {product}")


def flatten(value: Any, names: Mapping[str, str], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf that is compared, under the new names of candidates."""
    if isinstance(value, dict) and value.keys() == {"kind", "text"}:  # a reason, which was a sentence before
        yield where, str(Reason.model_validate(value))
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in (*DIGESTS, *TIMED, *RENAMED):
                yield from flatten(part, names, f"{where}.{names.get(key, key)}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from flatten(part, names, f"{where}.{_name(part, number, names)}")
    else:
        yield where, names.get(value, value) if isinstance(value, str) else value


def _name(part: Any, number: int, names: Mapping[str, str]) -> str:
    """Name an entry of a list by what it is about, so that another order is no difference."""
    if isinstance(part, dict):
        words = [part.get(key) for key in ("candidate", "metric", "name", "bucket", "case_id")]
        return " ".join(names.get(word, word) for word in words if isinstance(word, str)) or str(number)
    return str(number)


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return a line for each value that only one side has, or both have otherwise, and how many are rounding."""
    lines, num_rounded = [], 0
    for where in dict.fromkeys([*old, *new]):
        ours, theirs = old.get(where, _ABSENT), new.get(where, _ABSENT)
        if json.dumps(ours) == json.dumps(theirs):
            continue
        if isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, **_ROUNDING):
            num_rounded += 1
        else:
            lines.append(f"{where}: {ours!r} -> {theirs!r}")
    return lines, num_rounded


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default=".")
    parser.add_argument("--product", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--candidate", action="append", default=[], metavar="[PRODUCT/]OLD=NEW")
    parser.add_argument("--ignore", nargs="*", default=[], metavar="WORD", help="values whose path has this word")
    options = parser.parse_args()
    print("| product | candidates | values compared | differ by rounding | differ |\n|---|---:|---:|---:|---:|")
    differing: list[str] = []
    for was, now in (pair.split("=") for pair in options.product):
        given = [name.rpartition("/") for name in options.candidate]
        names = dict(pair.split("=") for product, _, pair in given if product in ("", was))
        sides = [
            dict(flatten(verdict, names))
            for verdict in (read_verdict(options.old, was), read_verdict(options.new, now))
        ]
        sides = [
            {where: value for where, value in side.items() if not any(word in where for word in options.ignore)}
            for side in sides
        ]
        lines, num_rounded = compare(*sides)
        candidates = {where.split(".")[2] for where in sides[1] if where.startswith(".verdicts.")}
        print(f"| {now} | {len(candidates)} | {len(sides[1]):,} | {num_rounded:,} | {len(lines):,} |")
        differing += [f"{now}{line}" for line in lines]
    print("\n".join(["", *differing]))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
