"""Record the libraries and the machine, and check settings, checkpoints and memory before any work."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline import image_preflight, network_preflight
from pipeline.drafts import digest_drafts
from pipeline.environment import describe_problems, read_libraries, read_machine, write_if_changed
from pipeline.evals.material import digest_evalsets
from pipeline.gate_preflight import check_gates
from pipeline.memory import check_needs, estimate_needs, read_available_mib
from pipeline.params import load_params
from pipeline.preflight import check_project
from pipeline.stage_code import digest_stages
from stages.cli import run_stage

OUTPUT = Path("build/env")


def main(argv: list[str]) -> int:
    """Write what was found to build/env, one JSON file each; print what the user should know on stderr."""
    params = load_params()
    check_project(params, Path())
    if params.images:
        image_preflight.check_images(params.images, Path())
        write_if_changed(OUTPUT / "images.json", image_preflight.describe_material(params.images, Path()))
    warnings, machine = [], read_machine()
    for track in filter(None, (params.detector, params.upscaler)):
        warnings += network_preflight.check_network(track, Path())
        warnings += network_preflight.describe_slow_formats(track, machine)
        write_if_changed(OUTPUT / f"{track.name}.json", network_preflight.describe_material(track, Path()))
    warnings += check_gates(params, Path())
    total = machine.memory_mib
    warnings += check_needs(estimate_needs(params, Path()), total_mib=total, available_mib=read_available_mib(total))
    for line in describe_problems(machine) + warnings:
        print(f"quantgate env: warning: {line}", file=sys.stderr)
    _tidy_benchmarks(Path("build/benchmarks"), params.benchmark.candidates)
    write_if_changed(OUTPUT / "libraries.json", read_libraries())
    write_if_changed(OUTPUT / "code.json", digest_stages(Path()))
    write_if_changed(OUTPUT / "machine.json", machine.model_dump())
    write_if_changed(OUTPUT / "drafts.json", digest_drafts(params, Path()))
    engines = {name: settings.engine.model_dump(mode="json") for name, settings in params.candidates.items()}
    write_if_changed(OUTPUT / "engines.json", engines)
    write_if_changed(OUTPUT / "evalsets.json", digest_evalsets(params, Path()))
    return 0


def _tidy_benchmarks(folder: Path, names: list[str]) -> None:
    """Leave the folder that compare depends on as a clone would have it: the listed candidates' results, no others."""
    for path in folder.glob("*.json"):
        if path.stem not in names:
            path.unlink()
    if not names:
        folder.mkdir(parents=True, exist_ok=True)  # no stage makes it, and DVC wants to see it


if __name__ == "__main__":
    run_stage("env", main)
