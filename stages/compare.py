"""Stage compare: judge every candidate against the reference, whatever the judgement is.

Exits 0 on a regression too, so that DVC records it; stopping a release is the next stages' matter.
"""

from __future__ import annotations

import json

from pipeline.benchmark_records import read_machine
from pipeline.files import write_text
from pipeline.gate.compare import compare_release
from pipeline.gate.guidance_plot import plot_guidance
from pipeline.gate.image_plots import plot_headroom, plot_worst_images
from pipeline.gate.plots import plot_completion, plot_harm, plot_speed
from pipeline.gate.report import metrics_tree, render_report
from pipeline.params import load_params
from pipeline.records import write_record
from pipeline.settings import BUILDS, METRICS, REPORTS, Track
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Judge the text track."""
    return compare(load_params(), "text")


def compare(track: Track, name: str) -> int:
    """Write a track's judgement, report, plots and one metrics file per candidate."""
    reports, metrics = REPORTS[name], METRICS[name]
    compared = compare_release(track, BUILDS[name])
    judgement = compared.judgement
    write_record(reports / "verdict.json", judgement)
    write_text(reports / "report.md", render_report(compared, read_machine(BUILDS["text"] / "env/machine.json")))
    plot_harm(judgement, reports / "harm.png")
    if name == "text":
        plot_completion(judgement, reports / "completion.png")
        plot_speed(judgement, reports / "speed.png")
    else:
        plot_worst_images(compared, reports / "worst.png")
        plot_headroom(compared, reports / "headroom.png")
        plot_guidance(compared, reports / "guidance.png")
    for candidate, measured in compared.measured.items():
        tree = json.dumps(metrics_tree(measured.metrics, judgement.policy), indent=2) + "\n"
        write_text(metrics / f"{candidate}.json", tree)
    for stale in metrics.glob("*.json"):
        if stale.stem not in compared.measured:
            stale.unlink()
    for verdict in judgement.verdicts:
        print(f"{verdict.candidate}: {verdict.outcome}")
    return 0


if __name__ == "__main__":
    run_stage("compare", main, is_short=True)
