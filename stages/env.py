"""Make what git does not hold, record libraries and machine, check settings, checkpoints and memory before any work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.gate.preflight import check_gates
from pipeline.products import KINDS
from pipeline.products.inputs import WARNED, digest_inputs, digest_references
from pipeline.products.params import list_texts, load_params
from pipeline.running.bytecode import list_bytecode_problems
from pipeline.running.environment import read_libraries, read_machine, write_if_changed
from pipeline.running.gpu_proof import list_gpu_problems, list_held_gpus, prove_gpus
from pipeline.running.made_files import make_missing
from pipeline.running.result_folders import remove_retired
from pipeline.settings.base import ENV
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Write what the stages depend on to build/env, one JSON file each; print what the user should know on stderr."""
    params, machine = load_params(), read_machine()
    make_missing(
        Path(), note=lambda line: print(f"quantgate env: {line}", file=sys.stderr), named_in=list_texts(params)
    )
    warnings = list_gpu_problems(machine, prove_gpus(machine, ENV)) + list_held_gpus(machine)
    warnings += list_bytecode_problems()
    for product in params.products.values():
        for folder in remove_retired(product.build, product.candidates):
            print(f"quantgate env: {folder}: removed, params.yaml has no such candidate any more", file=sys.stderr)
        warnings += map(product.name_in, KINDS[product.kind].check(product, Path(), machine))
    warnings += check_gates(params.products.values(), Path(), digest_references(params, Path()))
    for line in dict.fromkeys(warnings) if WARNED not in os.environ else ():
        print(f"quantgate env: warning: {line}", file=sys.stderr)
    write_if_changed(ENV / "libraries.json", read_libraries())
    write_if_changed(ENV / "machine.json", machine.model_dump())
    write_if_changed(ENV / "inputs.json", digest_inputs(params, Path()))
    return 0


if __name__ == "__main__":
    run_stage("env", main)
