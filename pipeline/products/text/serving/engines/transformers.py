"""The embedded engine: launcher processes of this environment, one per server.

Each server computes the facts about itself from what it loaded, and they must be the candidate's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.products.text.serving import launcher
from pipeline.products.text.serving.engines.engine import (
    LOCAL,
    Engine,
    ServerLaunch,
    check_facts,
    gather,
    probe_servers,
)
from pipeline.products.text.serving.engines.processes import ServerProcess, format_exit, spawn, stop
from pipeline.records.evaluations import Candidate
from pipeline.running.environment import VISIBLE, find_gpus, list_visible_gpus, read_torch_build
from pipeline.running.hub import locate_checkpoint
from pipeline.running.tracing import SUFFIX

PROJECT = Path(__file__).resolve().parents[5]


@contextlib.asynccontextmanager
async def start(launch: ServerLaunch) -> AsyncIterator[Engine]:
    """Start the servers of a candidate.

    Raises:
        EngineError: a server did not come up, loaded something else, or does not give what an eval needs.
    """
    candidate, resources = launch.candidate, launch.resources
    processes: list[ServerProcess] = []
    try:
        gpus: tuple[str, ...] = ()
        if read_torch_build() != "cpu":
            gpus = list_visible_gpus(len(await asyncio.to_thread(find_gpus)), os.environ.get(VISIBLE))
        places = spread(resources.num_servers, gpus, num_engines=launch.num_engines, engine_index=launch.engine_index)
        for index, place in enumerate(places):
            processes.append(
                _spawn(
                    candidate,
                    root=launch.root,
                    log=launch.logs / f"server-{index}.log",
                    host=launch.host,
                    port=launch.port,
                    place=place,
                    kv_cache_gib=resources.kv_cache_gib,
                    trace=launch.traces and launch.traces / f"server-{index}{SUFFIX}",
                )
            )
        reports = await gather(*(_read_report(p, resources.start_timeout_s) for p in processes))
        for process, report in zip(processes, reports, strict=True):
            check_facts(candidate, report["facts"], where=f"server {process.log.stem}")
        engine = Engine(
            base_urls=tuple(launch.url(report["port"]) for report in reports),
            model=candidate.name,
            facts=reports[0]["facts"],
            proof="computed by the server from the files and objects it loaded",
            echo=reports[0]["fingerprint"],
            config=reports[0]["config"],
            processes=tuple(processes),
        )
        await probe_servers(engine, launch)
        yield engine
    finally:
        stop(processes)


@dataclass(frozen=True)
class Place:
    """Where one server runs."""

    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it; None: the CPU, or a GPU if torch sees one
    num_sharing: int = 1  # servers there


def spread(num_servers: int, gpus: Sequence[str], *, num_engines: int = 1, engine_index: int = 0) -> list[Place]:
    """Give each server a GPU in turn; without one, all of them share the CPU.

    Args:
        num_servers: of one engine.
        gpus: names of those that may be used.
        num_engines: with as many servers each; the servers of the next one follow on the next GPUs.
        engine_index: of this engine among them.
    """
    if not gpus:
        return [Place(num_sharing=num_servers * num_engines)] * num_servers
    names = [gpus[index % len(gpus)] for index in range(num_servers * num_engines)]
    first = engine_index * num_servers
    return [Place(name, names.count(name)) for name in names[first : first + num_servers]]


def _spawn(
    candidate: Candidate,
    *,
    root: Path,
    log: Path,
    host: str = LOCAL,
    port: int | None = None,
    place: Place = Place(),
    kv_cache_gib: float | None = None,
    trace: Path | None = None,
) -> ServerProcess:
    speculative = candidate.serving.speculative
    config = json.dumps(
        {
            "checkpoint_folder": str(locate_checkpoint(candidate.checkpoint.path, root).resolve()),
            "draft_folder": str(locate_checkpoint(speculative.draft_path, root).resolve())
            if speculative and speculative.draft_path
            else None,
            "num_sharing": place.num_sharing,
            "kv_cache_gib": kv_cache_gib,
            "candidate": candidate.model_dump(mode="json"),
            "host": host,
            "port": port,
            "trace": str(trace.resolve()) if trace else None,
        }
    )
    threads = str(candidate.serving.num_threads)
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({VISIBLE: place.gpu} if place.gpu else {}),
    }
    command = [sys.executable, "-m", launcher.__name__, config]
    return spawn(command, folder=PROJECT, environment=environment, log=log, stdout=subprocess.PIPE)


async def _read_report(process: ServerProcess, timeout_s: float) -> dict[str, Any]:
    """Wait for the line with which a launcher announces itself."""
    assert process.popen.stdout is not None
    line = asyncio.get_running_loop().run_in_executor(None, process.popen.stdout.readline)
    try:
        text = await asyncio.wait_for(asyncio.shield(line), timeout_s)
    except TimeoutError:
        failure = process.failure(f"not ready after {timeout_s:g} s")
        process.popen.kill()  # also ends the read that is still waiting
        raise failure from None
    except asyncio.CancelledError:
        process.popen.kill()
        raise
    if not text:
        raise process.failure(format_exit(process.popen.wait()))
    return json.loads(text)
