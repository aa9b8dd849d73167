"""Stage track: log the judged candidates to MLflow, one flat run each. Decides nothing."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.gate.verdicts import REPORT_PATH, VERDICT_PATH, Judgement
from pipeline.records import read_record, write_text
from pipeline.run_contents import describe_runs
from pipeline.tracking import log_runs, write_pages
from stages.cli import run_stage

OUTPUT = Path("build/tracked.txt")


def main(argv: list[str]) -> int:
    """Log what MLflow does not hold yet and say where to look."""
    root = Path(os.environ.get("DVC_ROOT", "."))  # the real root, also for a queued experiment
    runs = describe_runs(read_record(VERDICT_PATH, Judgement), Path("build"))
    attachments = [REPORT_PATH, *sorted(REPORT_PATH.parent.glob("*.png"))]
    logged = log_runs(runs, root, attachments=attachments, dvc_experiment=os.environ.get("DVC_EXP_NAME", ""))
    write_pages(logged, root)
    print(f"MLflow: {sum(run.is_new for run in logged)} of {len(logged)} runs are new; `make ui` opens it")
    write_text(OUTPUT, "".join(f"{run.candidate} {run.key}\n" for run in runs))
    return 0


if __name__ == "__main__":
    run_stage("track", main, is_short=True)
