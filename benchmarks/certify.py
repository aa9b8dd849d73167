"""The kill table: defects planted in a finished project, of which none may pass: `make certify`.

    python -m benchmarks.certify [pattern] [--project FOLDER] [--measured]

Each row of `tests/certify/kill_rows.py` that the pattern finds gets a copy of the project in which one thing is wrong,
and the real stages run on it: optimize where weights are made, evaluate with real servers and workers where they
answer, compare and gate always. Rows about records of other tools and about what git keeps write their own beside it,
and run `quantgate compare` or what `.ci/gate` runs. A defect is killed when the release does not go out, whichever
stage stops it, and for the reason that the row gives. Changes that are none have to pass. Prints Markdown: what was
planted, the verdict, the first line that was said, the largest loss that was measured, and seconds; ends with 1 when a
row came out otherwise.

Needs a project on which `make repro` has finished. Rows that are done lie in build/certify.json and are not run again,
as long as the evaluations are the same. `--measured` adds what the gate alone sees of broken weights, which the check
in optimize stops before: they are no part of the score.

Not covered: two defects at once, and a judgement that is rewritten so that all of its numbers agree.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.check_faults import print_row, quote
from pipeline.products.params import load_params
from pipeline.records.digests import digest_file, digest_json
from pipeline.records.files import write_text
from tests.certify.kill_rows import MEASURED, ROWS
from tests.certify.kill_table import Kill, Observed, ProjectError, observe

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("planted", "how", "verdict", "said", "largest loss", "s")


def main() -> int:
    """Run the rows, print the tables and the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--project", type=Path, default=ROOT, help="whose stages have all run")
    parser.add_argument("--measured", action="store_true", help="measure broken weights that the gate alone would see")
    options = parser.parse_args()
    logging.disable()  # what the libraries say of the defects
    try:
        kept = Results(options.project.resolve())
        tables = [
            [row for row in ROWS if not row.must_pass],
            [row for row in ROWS if row.must_pass],
            MEASURED if options.measured else [],
        ]
        found = [run_table([row for row in rows if re.search(options.pattern, row.name)], kept) for rows in tables]
    except ProjectError as error:
        print(f"certify: {error}", file=sys.stderr)
        return 1
    wrong = [[row.name for row, seen in rows if not seen.is_right(row)] for rows in found[:2]]
    print()
    print_score("defects killed", len(found[0]), wrong[0])
    print_score("equivalent changes passed", len(found[1]), wrong[1])
    return 1 if any(wrong) else 0


def print_score(what: str, num: int, wrong: Sequence[str]) -> None:
    """Print how many rows came out as they must, and name the others."""
    print(f"{what}: {num - len(wrong)} of {num}" + (f"; NOT {', '.join(wrong)}" if wrong else ""))


class Results:
    """What rows came to, on disk: a run that was ended goes on where it stopped."""

    def __init__(self, project: Path) -> None:
        """Read what is there of the same evaluations.

        Raises:
            ProjectError: a product has none.
        """
        self.project, self._path = project, project / "build/certify.json"
        products = load_params(project / "params.yaml").products.values()
        self._state = digest_json({product.name: self._digest(product.build) for product in products})
        kept = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}
        self._rows: dict[str, Any] = kept["rows"] if kept.get("state") == self._state else {}

    def _digest(self, build: Path) -> dict[str, str]:
        paths = sorted((self.project / build / "evaluations").glob("*/evaluation.json"))
        if not paths:
            raise ProjectError(
                f"{self.project / build / 'evaluations'}: expected evaluations, found none; run `make repro` first"
            )
        return {path.parent.name: digest_file(path) for path in paths}

    def observe(self, row: Kill) -> Observed:
        """Return what a row came to; run it where that is not known."""
        if row.name not in self._rows:
            with tempfile.TemporaryDirectory(prefix="quantgate-certify-") as temporary:
                # a checkpoint's path is told relative to its project, once links are resolved
                self._rows[row.name] = asdict(observe(row, self.project, Path(temporary).resolve() / "trial"))
            write_text(self._path, json.dumps({"state": self._state, "rows": self._rows}, indent=1) + "\n")
        return Observed(**self._rows[row.name])


def run_table(rows: Sequence[Kill], kept: Results) -> list[tuple[Kill, Observed]]:
    """Run rows and print them as one table."""
    found = []
    if rows:
        print()
        print_row(*COLUMNS)
        print_row("---", "---", "---", "---", "---", "---:")
    for row in rows:
        seen = kept.observe(row)
        said = quote(seen.reasons[0]) if not seen.passes else ""
        print_row(row.name, row.how, describe_verdict(seen), said, seen.loss, f"{seen.seconds:.0f}")
        found.append((row, seen))
    return found


def describe_verdict(seen: Observed) -> str:
    """Say how a row ended: the verdict, or the stage that refused to go on to one."""
    return f"refused by {seen.stage}" if seen.verdict == "error" else seen.verdict


if __name__ == "__main__":
    sys.exit(main())
