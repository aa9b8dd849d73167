"""What a user sees when a server goes wrong, and what is lost: `python -m benchmarks.check_faults [pattern]`.

Runs every row of the fault table (`tests/certify/fault_rows.py`) that the pattern finds: a whole evaluation
against a real server on a tiny checkpoint, behind a proxy that breaks one thing, then a second evaluation
with the fault gone. Prints a Markdown table and proves that

- the stage ends with one line, or finishes where the fault passes over,
- no case that was finished at the fault is asked again, and none is left out,
- the records in the end equal those of a run that nothing disturbed, latencies aside,
- the release is never passed on what the fault left, and passes once it is gone.

An attached server is asked everything again after a run that finished: it may serve another model by
then. The waits between tries are cut short, those that a server asks for are not. Not covered: faults of
the disk and of the stage itself, and servers of other makes.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from pathlib import Path

from tests.certify.fault_project import NUM_CASES
from tests.certify.fault_rows import ROWS
from tests.certify.fault_table import Observed, Row, Table, find_problems
from tests.fakes.judging import list_said

COLUMNS = (
    "fault",
    "what the user sees",
    "cases kept at the fault",
    "of these asked again",
    "records that differ after recovery",
)
MAX_SHOWN = 300  # characters of a line


def main(argv: list[str]) -> int:
    """Run the rows, print the table; 1 when one is not what it has to be."""
    rows = [row for row in ROWS if re.search(argv[0] if argv else "", row.name)]
    logging.disable()  # what the libraries say of the faults
    wrong = []
    with tempfile.TemporaryDirectory() as temporary, Table(Path(temporary)) as table:
        print_row(*COLUMNS)
        print_row("---", "---", "---:", "---:", "---:")
        for row in rows:
            found = table.observe(row)
            print_row(
                row.name, describe(row, found), f"{found.num_kept} of {NUM_CASES}", found.num_again, found.num_differing
            )
            wrong += [f"{row.name}: {problem}" for problem in find_problems(row, found)]
    print("\n".join(["", *wrong, f"{len(rows)} faults, {'DOES NOT HOLD' if wrong else 'holds'}"]))
    return 1 if wrong else 0


def describe(row: Row, found: Observed) -> str:
    """Return the line that the stage ended with, or the first reason of the gate's refusal where it finished."""
    said = found.said.removeprefix("quantgate evaluate: ")
    if not said and row.verdict == "pass":
        return "nothing, exit 0"
    if not said:
        said = "gate: " + next(r for r in list_said(found.verdict) if r.startswith("refused: "))
    return quote(said)


def quote(said: str) -> str:
    """Return a line as code in a cell of a Markdown table, cut where it is long."""
    said = re.sub(r"127\.0\.0\.1:\d+", "HOST", said)
    said = said if len(said) <= MAX_SHOWN else said[: MAX_SHOWN - 3] + "..."
    return "`" + said.replace("`", "'").replace("|", "\\|") + "`"


def print_row(*cells: object) -> None:
    """Print one row of a Markdown table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
