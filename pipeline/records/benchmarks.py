"""What the stage `benchmark` measured, as JSON on disk: rounds as they were timed, never a judgement.

`gate/speed.py` turns them into medians, intervals and outcomes. Work that was not equal is recorded as a
refusal without any number.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from pipeline.records.record_files import Record
from pipeline.records.speculation import SpeculationCounts


class Batch(Record):
    """One timed batch of requests; latencies are medians over its requests."""

    throughput_tokens_per_s: float = Field(gt=0)  # completion tokens over the batch's wall time
    ttft_ms: float = Field(gt=0)
    inter_token_latency_ms: float = Field(gt=0)


class Cell(Record):
    """One place of the grid: the batches of both sides, round by round on the same prompts."""

    concurrency: int  # requests in flight
    prompt_tokens: tuple[int, int]  # the band, both ends included
    num_requests: int  # a batch
    reference: tuple[Batch, ...]
    candidate: tuple[Batch, ...]


class Probe(Record):
    """A prompt of the timed ones' kind, beside itself with a beginning that nobody had asked; asked in turn."""

    prompt_tokens: tuple[int, int]  # the band
    known_ttft_ms: float = Field(gt=0)  # of the prompt as the evals asked it
    fresh_ttft_ms: float = Field(gt=0)


class Side(Record):
    """What is known of one of the two servers after the timed rounds."""

    fingerprint: str
    peak_memory_mib: float | None  # largest resident set (VmHWM) of its processes since they started; None: not ours
    gpu_memory_mib: float | None = None  # that its processes held after the rounds; None: not known
    num_requests: int  # timed ones: each was compared with what was evaluated
    num_changed: int  # timed answers that neither start the evaluated one nor are started by it
    probes: tuple[Probe, ...]  # before the rounds, one request in flight
    repeat_ttft_ratio: float = Field(gt=0)  # of prompts sent a second time after the rounds, to their first time
    speculation: SpeculationCounts | None = None


class Machine(Record):
    """Where it was measured: DVC may restore a result that another machine made."""

    cpu: str
    num_cores: int
    gpus: tuple[str, ...]


class Work(Record):
    """What was asked of both sides."""

    concurrency: tuple[int, ...]
    prompt_tokens: tuple[tuple[int, int], ...]
    num_tokens: int  # completion tokens, of every request
    rounds: int


class Benchmark(Record):
    """One candidate timed against the reference (`build/<product>/benchmarks/<candidate>.json`).

    `refusal` says why there are no numbers; otherwise it is None, and `reference`, `candidate` and `cells` are there.
    """

    name: str
    key: str = ""  # digest of what was timed; "": of before it was kept
    work: Work
    machine: Machine
    definitions: str
    refusal: str | None = None
    reference: Side | None = None
    candidate: Side | None = None
    cells: tuple[Cell, ...] = ()


def read_machine(path: Path) -> Machine | None:
    """Return the machine that the stage `env` described, as far as a benchmark tells machines apart; None: no file.

    It is no dependency of the stages that read it: on another machine the same results must stay up to date.
    """
    if not path.is_file():
        return None
    machine = json.loads(path.read_text(encoding="utf-8"))
    return Machine(
        cpu=machine["cpu"], num_cores=machine["num_cores"], gpus=tuple(gpu["name"] for gpu in machine["gpus"])
    )
