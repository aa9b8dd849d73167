"""Are the numbers of two commits the same? For a change that should move none: layout, names, speed.

    python -m benchmarks.same_numbers OLD [NEW] [--product OLD=NEW ...] [--candidate OLD=NEW ...]

Compares every value of every product's verdict and metrics in two commits of a project (NEW: the working tree), byte
for byte as JSON has them. Not compared: fingerprints and digests, which hold paths and names, texts in which a name
stands, and what was timed. Prints a row a product, then each value that differs; ends with 1 when one does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DIGESTS = ("reference_fingerprint", "fingerprint", "behaviour")
TIMED = ("seconds", "speed", "gain", "total", "latency_ms")
RENAMED = ("policy",)  # what was asked, in which names and sections stand
_FILES = {"verdict": ("reports/{}/verdict.json", "reports/verdict.json")}  # the latter: of text, before it had a name


def read(commit: str | None, path: str) -> str | None:
    """Return a file of a commit, or of the working tree; None: it has no such file."""
    if commit is None:
        return Path(path).read_text(encoding="utf-8") if Path(path).is_file() else None
    done = subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def read_verdict(commit: str | None, product: str) -> dict[str, Any]:
    """Return a product's verdict."""
    for path in (f"reports/{product}/verdict.json", *(["reports/verdict.json"] if product == "text" else [])):
        if text := read(commit, path):
            return dict(json.loads(text))
    sys.exit(f"{commit or 'here'}: no verdict of {product}")


def flatten(value: Any, names: Mapping[str, str], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf that is compared, under the new names of candidates."""
    if isinstance(value, dict):
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


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each value that only one side has, or both have otherwise."""
    absent = "nothing"
    return [
        f"{where}: {old.get(where, absent)!r} -> {new.get(where, absent)!r}"
        for where in dict.fromkeys([*old, *new])
        if json.dumps(old.get(where, absent)) != json.dumps(new.get(where, absent))
    ]


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--product", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--candidate", action="append", default=[], metavar="[PRODUCT/]OLD=NEW")
    parser.add_argument("--ignore", nargs="*", default=[], metavar="WORD", help="values whose path has this word")
    options = parser.parse_args()
    print("| product | candidates | values compared | differ |\n|---|---:|---:|---:|")
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
        found = compare(*sides)
        candidates = {where.split(".")[2] for where in sides[1] if where.startswith(".verdicts.")}
        print(f"| {now} | {len(candidates)} | {len(sides[1]):,} | {len(found):,} |")
        differing += [f"{now}{line}" for line in found]
    print("\n".join(["", *differing]))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
