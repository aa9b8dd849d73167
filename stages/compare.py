"""Stage compare: judge every candidate against the reference, whatever the judgement is.

Exits 0 on a regression too, so that DVC records it; stopping a release is the next stages' matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.benchmark_records import read_machine
from pipeline.files import write_text
from pipeline.gate.compare import ReleaseComparison, compare_release
from pipeline.gate.guidance_plot import plot_guidance
from pipeline.gate.image_plots import plot_headroom, plot_worst_images
from pipeline.gate.network_pictures import plot_found, plot_seams
from pipeline.gate.network_plots import plot_buckets, plot_layers
from pipeline.gate.outputs.publish import write_metrics, write_outputs
from pipeline.gate.plots import plot_completion, plot_harm, plot_speed
from pipeline.gate.report import render_report
from pipeline.params import get_track, load_params
from pipeline.record_files import write_record
from pipeline.settings import BUILDS, METRICS, REPORTS, Track
from stages.cli import run_stage

Plot = Callable[[ReleaseComparison, Path], None]
PLOTS: dict[str, dict[str, Plot]] = {  # by track, beside harm.png
    "text": {"completion.png": lambda c, path: plot_completion(c.judgement, path),
             "speed.png": lambda c, path: plot_speed(c.judgement, path)},
    "images": {"worst.png": plot_worst_images, "headroom.png": plot_headroom, "guidance.png": plot_guidance},
    "detector": {"buckets.png": lambda c, path: plot_buckets(c.judgement, path), "worst.png": plot_found,
                 "layers.png": plot_layers},
    "upscaler": {"worst.png": plot_worst_images, "seams.png": plot_seams, "layers.png": plot_layers},
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Write judgement, report, its other forms, plots and metrics of the track named on the command line."""
    track = get_track(load_params(), " ".join(argv) or "text", kind=Track)
    reports = REPORTS[track.name]
    compared = compare_release(track, BUILDS[track.name])
    judgement = compared.judgement
    write_record(reports / "verdict.json", judgement)
    write_text(reports / "report.md", render_report(compared, read_machine(BUILDS["text"] / "env/machine.json")))
    plot_harm(judgement, reports / "harm.png")
    for picture, plot in PLOTS[track.name].items():
        plot(compared, reports / picture)
    write_outputs(compared, reports, BUILDS[track.name])
    write_metrics(compared, METRICS[track.name])
    for verdict in judgement.verdicts:
        print(f"{verdict.candidate}: {verdict.outcome}")
    return 0


if __name__ == "__main__":
    run_stage("compare", main, is_short=True)
