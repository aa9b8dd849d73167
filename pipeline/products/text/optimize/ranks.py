"""Quantise by several processes at once, one a GPU, as llm-compressor's distributed oneshot does.

Each rank has the whole model and a share of the calibration samples. What was seen of inputs is summed over ranks, and
GPTQ shares out the layers too. Sums are put together in another order than in one process, so another number of ranks
writes other weights: it is a setting of the step, and not of the machine.

The library means to be started by `torchrun`. Here the stage starts the ranks itself, so that none outlives it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.step_settings import QuantizeStep
from pipeline.running.worker_pool import end_with_parent

_STORE = "store"  # the file by which ranks find each other


@dataclass(frozen=True)
class RankOrder:
    """What each rank is told."""

    source: Path
    destination: Path
    step: QuantizeStep
    plan: LayerPlan
    samples: list[list[int]]
    num_threads: int  # of torch in each rank: sums are split by thread
    folder: Path  # for the store, and for what each rank has to say


def quantize_by_ranks(
    source: Path, destination: Path, *, step: QuantizeStep, plan: LayerPlan, log: StepLog, samples: list[list[int]]
) -> None:
    """Quantise a checkpoint by `step.world_size` processes; losses, fallbacks and ranges go to the log.

    Raises:
        QuantizationError: a rank failed.
    """
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        order = RankOrder(source, destination, step, plan, samples, torch.get_num_threads(), Path(temporary))
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_run_rank, args=(rank, order)) for rank in range(step.world_size)]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, order)
        finally:
            for process in ranks:
                process.kill()  # those that wait for one that failed would do so for half an hour
        for rank in range(step.world_size):
            log.merge(pickle.loads(_name(order, rank, "log").read_bytes()))  # our own process wrote it


def _wait(ranks: Sequence[BaseProcess], order: RankOrder) -> None:
    """Wait for all ranks; raise what the first that failed says."""
    waiting: dict[Any, tuple[int, BaseProcess]] = {
        process.sentinel: (rank, process) for rank, process in enumerate(ranks)
    }
    while waiting:
        for sentinel in wait(list(waiting)):
            rank, process = waiting.pop(sentinel)
            process.join()
            if process.exitcode:
                raise QuantizationError(
                    f"{_find_cause(order, rank)} (exit code {process.exitcode}); lower world_size, or see what ended it"
                )


def _find_cause(order: RankOrder, ended: int) -> str:
    """Return what the first rank that failed says: the others say that it is gone."""
    problems = sorted(order.folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not problems:
        return f"rank {ended} of {order.step.world_size}: it ended by itself"
    return f"rank {problems[0].stem} of {order.step.world_size}: {problems[0].read_text(encoding='utf-8')}"


def _run_rank(rank: int, order: RankOrder) -> None:
    """Quantise as one of several; the first rank writes the checkpoint."""
    threading.Thread(target=end_with_parent, daemon=True, name="parent-watch").start()
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w")):  # the stage prints losses once
            log = _quantize(rank, order)
        _name(order, rank, "log").write_bytes(pickle.dumps(log.export()))
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        _name(order, rank, "error").write_text(said, encoding="utf-8")
        raise SystemExit(1) from None


def _quantize(rank: int, order: RankOrder) -> StepLog:
    import torch
    import torch.distributed as dist
    from compressed_tensors.offload import load_offloaded_model
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from pipeline.products.text.model_loading import hide_progress_bars, load_tokenizer
    from pipeline.products.text.optimize.llm_compressor import build_recipe, run_recipe, save_compressed

    logging.set_verbosity_error()  # ranks but the first load no weights, and are given them
    torch.set_num_threads(order.num_threads)
    size, has_gpu = order.step.world_size, torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=f"file://{order.folder / _STORE}",
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", rank) if has_gpu else None,
    )
    # the stage has loaded it once: it fits, and needs no room on a disk
    with load_offloaded_model(extra_cpu_mem=0), hide_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            order.source,
            dtype="auto",
            device_map="auto_offload",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        ).eval()
    log = StepLog(order.step.algorithm, total=len(order.plan.asked))
    recipe = build_recipe(order.step, order.plan, log, model=model)
    run_recipe(model, load_tokenizer(order.source), recipe, samples=order.samples[rank::size])
    save_compressed(model, order.destination)
    dist.barrier()
    dist.destroy_process_group()  # not after an error, which others would then tell first
    return log


def _name(order: RankOrder, rank: int, what: str) -> Path:
    return order.folder / f"{rank}.{what}"
