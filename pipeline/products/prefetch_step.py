"""One step of a candidate, and its share of the machine; what the step does in a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.products import KINDS
from pipeline.products.params import Params, list_project_files
from pipeline.running.environment import VISIBLE, list_own_gpus
from pipeline.running.journal import lock_candidate
from pipeline.running.prefetched import Work, digest_inputs_now, keep, put_back, read_watched
from pipeline.running.progress import begin_step, tell_cpu, tell_taken
from pipeline.running.result_folders import check_evaluation_folders
from pipeline.running.stage_code import digest_code
from pipeline.running.worker_pool import work_here
from pipeline.settings.base import ENV, Product
from pipeline.settings.execution import RayExecution

TURNS = ENV / "turns"  # where steps that work side by side take turns


@dataclass(frozen=True)
class Order:
    """One step of a candidate, and its share of the machine. The settings are those that stage `env` saw.

    Attributes:
        stage: "optimize" or "evaluate".
        candidate: its name.
        product: that owns the candidate.
        params: the whole file.
        watched: by stage what stage `env` found, ahead of all work.
        num_workers: processes that it may have at once.
        gpus: that it may be evaluated on, as CUDA_VISIBLE_DEVICES names them; None: all of this process.
    """

    stage: str
    candidate: str
    product: Product
    params: Params
    watched: Mapping[str, Mapping[str, str]]
    num_workers: int
    gpus: str | None = None

    @property
    def step(self) -> str:
        """Its name, as of a stage of DVC."""
        return f"{self.stage}@{self.candidate}"


def preload(order: Order) -> None:
    """Import what a step needs, in the process that the step's own is a copy of.

    Nothing where there is a GPU, which a copy could not use, nor on macOS, whose libraries don't stand being copied.
    """
    digest_code(order.stage, order.product.kind)  # it keeps which files import which
    if sys.platform == "linux" and not list_own_gpus():
        KINDS[order.product.kind].preload(order.stage, order.product.restrict([order.candidate]), Path())


def carry_out(order: Order) -> None:
    """Do what a stage does, and keep the result for it.

    Raises:
        EvidenceError: what it is made of was edited since prefetch began: the process has imported what was there.
    """
    if order.gpus is not None and order.stage == "evaluate":
        os.environ[VISIBLE] = order.gpus
    begin_step(order.step)
    try:
        _carry_out(order)
    finally:
        tell_cpu()


def _carry_out(order: Order) -> None:
    work_here(TURNS)
    work = Work(order.stage, order.candidate, order.product)
    inputs = _digest_inputs(order, work)
    with lock_candidate(order.product.build, order.candidate):
        if put_back(work, inputs):
            tell_taken(order.step)
            print(f"{order.stage}: kept from an earlier prefetch")
            return
    _run_stage(order)
    with lock_candidate(order.product.build, order.candidate):
        if _digest_inputs(order, work) != inputs:
            raise EvidenceError(f"{work.target}: the candidate was removed or made anew meanwhile; run prefetch again")
        keep(work, inputs)


def _digest_inputs(order: Order, work: Work) -> str:
    """Return the digest of a step's inputs, which are those that its process has imported and was given."""
    is_same = read_watched(order.stage, order.candidate) == order.watched[order.stage]
    if not is_same or not (inputs := digest_inputs_now(work)):
        raise EvidenceError(f"{work.target}: settings, files or code were edited meanwhile; run prefetch again")
    return inputs


def _run_stage(order: Order) -> None:
    """Run what the file of the stage runs, here or on a cluster."""
    name, product, build = order.candidate, order.product, order.product.build
    own, kind = product.use_workers(order.num_workers), KINDS[product.kind]
    if order.stage == "evaluate":
        check_evaluation_folders(build, name)
    if isinstance(order.params.execution, RayExecution):
        from pipeline.products import ray_cluster

        needed = partial(list_project_files, order.params, product, name)
        on_ray = {"optimize": ray_cluster.build_on_ray, "evaluate": ray_cluster.evaluate_on_ray}[order.stage]
        with lock_candidate(build, name) if order.stage == "optimize" else contextlib.nullcontext():
            print(on_ray(order.params.execution, name, product, needed) or "evaluated on the cluster")
    elif order.stage == "optimize":
        with lock_candidate(build, name):
            print(kind.optimize(name, own, root=Path(), build=build))
    else:
        kind.evaluate(name, own, root=Path(), build=build)
