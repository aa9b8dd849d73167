"""Make what git does not hold, record libraries and machine, check settings, checkpoints and memory before any work."""

from __future__ import annotations

from pathlib import Path

from pipeline.products.checking import check_products
from pipeline.products.inputs import digest_inputs
from pipeline.products.params import load_params
from pipeline.running.environment import read_libraries, read_machine, write_if_changed
from pipeline.settings.base import ENV
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Write what the stages depend on to build/env, one JSON file each; print what the user should know on stderr."""
    params, machine = load_params(), read_machine()
    check_products(params, params.products.values(), machine, caller="env")
    write_if_changed(ENV / "libraries.json", read_libraries())
    write_if_changed(ENV / "machine.json", machine.model_dump())
    write_if_changed(ENV / "inputs.json", digest_inputs(params, Path()))
    return 0


if __name__ == "__main__":
    run_stage("env", main)
