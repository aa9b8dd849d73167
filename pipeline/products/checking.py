"""All checks before any work, for stage `env` and `make plan`: settings against files, gate and machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from pipeline.errors import SizeError
from pipeline.gate.preflight import check_gates, check_stages
from pipeline.products import KINDS
from pipeline.products.inputs import WARNED, WORKS, digest_references, digest_servings
from pipeline.products.params import Params, list_texts
from pipeline.running.bytecode import list_bytecode_problems
from pipeline.running.environment import Machine
from pipeline.running.gpu_proof import list_gpu_problems, list_held_gpus, prove_gpus
from pipeline.running.made_files import make_missing
from pipeline.running.result_folders import list_retired
from pipeline.settings.base import ENV, Product
from pipeline.settings.execution import LocalExecution


def check_products(params: Params, products: Collection[Product], machine: Machine, *, caller: str) -> None:
    """Make the files that git does not hold, check products, and print warnings on stderr.

    Args:
        params: the whole file.
        products: those to check.
        machine: this one.
        caller: the command, with whose name each line begins.

    Raises:
        QuantgateError: the first mistake; a SizeError where there is no other.
    """
    make_missing(
        Path(), note=lambda line: print(f"quantgate {caller}: {line}", file=sys.stderr), named_in=list_texts(params)
    )
    check_stages(Path("dvc.yaml"))
    warnings = list_gpu_problems(machine, prove_gpus(machine, ENV)) + list_held_gpus(machine)
    warnings += list_bytecode_problems()
    works_here = isinstance(params.execution, LocalExecution) and WORKS in os.environ
    too_small = list[SizeError]()
    for product in products:
        warnings += map(product.name_in, list_retired(product.build, product.candidates))
        with _collect(too_small):
            warnings += map(product.name_in, KINDS[product.kind].check(product, Path(), machine, is_local=works_here))
        with _collect(too_small):
            pinned = (digest([product], Path()) for digest in (digest_references, digest_servings))
            warnings += check_gates([product], Path(), *pinned)
    for line in dict.fromkeys(warnings) if WARNED not in os.environ else ():
        print(f"quantgate {caller}: warning: {line}", file=sys.stderr)
    if too_small:
        raise too_small[0]


@contextlib.contextmanager
def _collect(too_small: list[SizeError]) -> Iterator[None]:
    """Go on behind a suite or a machine that is too small: another mistake is not of this kind, and comes first."""
    try:
        yield
    except SizeError as error:
        too_small.append(error)
