"""Stage compare: judge every candidate against the reference, whatever the judgement is.

Exits 0 on a regression too, so that DVC records it; stopping a release is the next stages' matter.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.benchmark_records import read_machine
from pipeline.gate.compare import compare_release
from pipeline.gate.plots import plot_completion, plot_harm, plot_speed
from pipeline.gate.report import metrics_tree, render_report
from pipeline.gate.verdicts import REPORT_PATH, VERDICT_PATH
from pipeline.params import load_params
from pipeline.records import write_record, write_text
from stages.cli import run_stage

METRICS = Path("metrics")


def main(argv: list[str]) -> int:
    """Write the judgement, the report, the plots and one metrics file per candidate."""
    build = Path("build")
    compared = compare_release(load_params(), build)
    judgement = compared.judgement
    write_record(VERDICT_PATH, judgement)
    write_text(REPORT_PATH, render_report(compared, read_machine(build / "env/machine.json")))
    plot_harm(judgement, REPORT_PATH.with_name("harm.png"))
    plot_completion(judgement, REPORT_PATH.with_name("completion.png"))
    plot_speed(judgement, REPORT_PATH.with_name("speed.png"))
    for name, measured in compared.measured.items():
        tree = json.dumps(metrics_tree(measured.metrics, judgement.policy), indent=2) + "\n"
        write_text(METRICS / f"{name}.json", tree)
    for stale in METRICS.glob("*.json"):
        if stale.stem not in compared.measured:
            stale.unlink()
    for verdict in judgement.verdicts:
        print(f"{verdict.candidate}: {verdict.outcome}")
    return 0


if __name__ == "__main__":
    run_stage("compare", main, is_short=True)
