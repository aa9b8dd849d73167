"""vLLM, started from its own environment or container by the command of params.yaml.

It gets one configuration file, which is what a release would be served with, a free port, and a keeper
that ends it with us. Ready means that it has answered real requests. `/version` and `/server_info`
show how it resolved the file; its development mode adds the second, and the call by which its workers name the kernels
that they dispatched. Nothing else depends on that mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import EngineError
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines import keeper
from pipeline.products.text.serving.engines.engine import Engine, ServerLaunch, check_facts, probe_servers
from pipeline.products.text.serving.engines.processes import ServerProcess, spawn, stop_kept
from pipeline.products.text.serving.vllm_config import (
    CONFIG_FILE,
    build_config,
    check_config,
    rename_method,
    render_config,
)
from pipeline.products.text.serving.vllm_facts import read_kernels, read_resolved, read_sampling
from pipeline.products.text.serving.vllm_worker import quantgate_kernels
from pipeline.products.text.settings import KERNEL_REPORT_OPTION
from pipeline.records.digests import digest_bytes, digest_checkpoint, digest_files, digest_json
from pipeline.records.evaluations import Candidate
from pipeline.records.files import write_text
from pipeline.records.fingerprints import read_environment
from pipeline.running.environment import VISIBLE, find_gpus, list_visible_gpus, read_hardware
from pipeline.running.hub import locate_checkpoint
from pipeline.settings.hub_names import parse_pinned

STOP_TIMEOUT_S = 2 * keeper.TERMINATE_TIMEOUT_S
POLL_S = 0.5
_MAX_SCRIPT_BYTES = 1 << 20
_MEMORY_OPTION, _MEMORY_FRACTION = "gpu-memory-utilization", 0.9  # vLLM's default: of each GPU, whoever else is there
_SIZES = {
    "tensor-parallel-size": "parallel_config.tensor_parallel_size",
    "data-parallel-size": "parallel_config.data_parallel_size",
}
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # adds /server_info
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
# no stacks, and none of the frontend, which runs no kernel: a file a rank, of a size that a viewer opens
_PROFILER = {"profiler": "torch", "torch_profiler_with_stack": False, "ignore_frontend": True}


@contextlib.asynccontextmanager
async def start(launch: ServerLaunch) -> AsyncIterator[Engine]:
    """Start vLLM on a candidate.

    Raises:
        SettingsError: an option that this release of vLLM does not have.
        EngineError: it did not come up, is another release, loaded something else, or does not give what an
            eval needs.
    """
    candidate, port = launch.candidate, _find_port(launch)
    checkpoint = _digest(locate_checkpoint(candidate.checkpoint.path, launch.root))
    config = build_config(candidate, needs_scores=launch.needs_scores) | {"host": launch.host}
    config = place_models(config, launch.root)
    check_config(config, version=str(candidate.serving.version), where=f"candidates.{candidate.name}")
    path = launch.logs / CONFIG_FILE
    write_text(path, render_config(config))
    process = _spawn(launch, path, port)
    try:
        url = launch.url(port)
        facts = await _wait(process, url, launch) | {"checkpoint": checkpoint}
        check_facts(candidate, facts, where="server server-0")
        proof = "computed from the files before the start, and from what the running engine says of itself"
        engine = Engine(
            (url,),
            candidate.name,
            facts,
            proof,
            echo=config.get("fingerprint-value"),
            config={CONFIG_FILE: render_config(config)},
            processes=(process,),
        )
        await probe_servers(engine, launch)
        yield engine
    finally:
        stop_kept(process, STOP_TIMEOUT_S)


def place_models(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return a config that names the folders of pinned models: vLLM would look for them under other names.

    Like all others they are relative to `root`, the folder that vLLM is started in.
    """
    placed = dict(config)
    if parse_pinned(str(config.get("model"))):
        placed["model"] = str(locate_checkpoint(config["model"], root).relative_to(root))
    if drafts := config.get("speculative-config"):
        placed["speculative-config"] = place_models(drafts, root)
    return placed


def divide_gpus(
    gpus: Sequence[str], options: Mapping[str, Any], *, num_engines: int, engine_index: int
) -> tuple[dict[str, str], list[str]]:
    """Return the variables and arguments by which several engines have GPUs of their own, or share them.

    Args:
        gpus: names of those that may be used.
        options: of this vLLM.
        num_engines: that run on this machine at once, each on as many GPUs.
        engine_index: of this one among them.
    """
    size = math.prod(int(options.get(f"{kind}-parallel-size", 1)) for kind in ("tensor", "pipeline", "data"))
    if num_engines * size <= len(gpus):
        return {VISIBLE: ",".join(gpus[engine_index * size : (engine_index + 1) * size])}, []
    if not gpus or _MEMORY_OPTION in options:
        return {}, []
    return {}, [f"--{_MEMORY_OPTION}", f"{_MEMORY_FRACTION / num_engines:.3g}"]


def _spawn(launch: ServerLaunch, config: Path, port: int) -> ServerProcess:
    serving, traces = launch.candidate.serving, launch.traces
    environment = os.environ | _ENVIRONMENT | serving.environment
    # the rest is on the command line: the file is what a release would be served with
    arguments = [*serving.command, "--config", str(config.resolve()), "--port", str(port)]
    if launch.num_engines > 1:
        gpus = list_visible_gpus(len(find_gpus()), environment.get(VISIBLE))
        variables, shares = divide_gpus(
            gpus, serving.options, num_engines=launch.num_engines, engine_index=launch.engine_index
        )
        environment, arguments = environment | variables, arguments + shares
    if traces is not None:
        arguments += ["--profiler-config", json.dumps(_PROFILER | {"torch_profiler_dir": str(traces.resolve())})]
    if KERNEL_REPORT_OPTION in serving.options:
        folders = [str(Path(quantgate_kernels.__file__).parent), environment.get("PYTHONPATH", "")]
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, keeper.__file__, *arguments]
    return spawn(command, folder=launch.root, environment=environment, log=launch.logs / "server-0.log")


async def _wait(process: ServerProcess, url: str, launch: ServerLaunch) -> dict[str, Any]:
    """Wait until the server lists its model, and return the facts that it states."""
    limit_s, start = launch.resources.start_timeout_s, time.monotonic()
    async with Client(
        [url],
        launch.candidate.name,
        concurrency=1,
        timeout_s=launch.resources.request_timeout_s,
        max_refusals=1,
        check_alive=process.check_alive,
    ) as client:
        while True:
            process.check_alive()
            try:
                await client.list_models()
                return await _read_facts(client, launch)
            except EngineError as error:
                process.check_alive()
                if time.monotonic() - start > limit_s:
                    raise process.failure(f"not ready after {limit_s:g} s ({error})") from None
            await asyncio.sleep(POLL_S)


async def _read_facts(client: Client, launch: ServerLaunch) -> dict[str, Any]:
    candidate = launch.candidate
    version = str((await client.get("/version"))["version"])
    info = await client.get("/server_info?config_format=json")
    resolved, system = read_resolved(info), info.get("system_env") or {}
    serving = candidate.serving.identity()
    if "model_config.dtype" in resolved:
        serving["dtype"] = str(resolved["model_config.dtype"]).removeprefix("torch.")
    serving["options"] = _correct_sizes(serving["options"], resolved)
    serving["speculative.num_tokens"] = resolved.get("speculative_config.num_speculative_tokens")
    method = resolved.get("speculative_config.method")
    if method != rename_method(serving["speculative.method"]):
        serving["speculative.method"] = method
    if (draft := candidate.serving.speculative) and draft.draft_path:
        serving["speculative.draft_digest"] = digest_checkpoint(locate_checkpoint(draft.draft_path, launch.root))
    return {
        "serving": serving,
        "libraries": {"vllm": version.split("+")[0]},
        "engine": resolved | await read_kernels(client, info),
        "sampling": read_sampling(locate_checkpoint(candidate.checkpoint.path, launch.root), candidate.serving.options),
        "environment": read_environment(os.environ | candidate.serving.environment)
        | {f"command.{name}": digest for name, digest in _digest_scripts(candidate, launch.root)},
        "hardware": _read_hardware(resolved, system),
    }


def _correct_sizes(options: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the degrees of parallelism that the engine runs with, where it states them."""
    corrected = dict(options)
    for option, key in _SIZES.items():
        if (size := resolved.get(key)) is not None and size != options.get(option, 1):
            corrected[option] = size
    return corrected


def _read_hardware(resolved: Mapping[str, Any], system: Mapping[str, Any]) -> dict[str, str]:
    gpu = str(system.get("nvidia_gpu_models") or "").splitlines()
    is_cpu = resolved.get("device_config.device") == "cpu"
    return read_hardware("cpu" if is_cpu or not gpu else gpu[0].partition(": ")[2].strip())


def _digest(folder: Path) -> dict[str, Any]:
    files = digest_files(folder)
    return {"digest": digest_json(files), "files": files}


def _digest_scripts(candidate: Candidate, root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each script in the command: what it does before vLLM starts is part of the path.

    The first line may name the folder of an environment, and does not count.
    """
    for word in candidate.serving.command:
        path = root / word if "/" in word else Path(shutil.which(word) or root / word)
        if path.is_file() and (content := path.read_bytes()[:_MAX_SCRIPT_BYTES]).isascii():
            yield path.name, digest_bytes(content.partition(b"\n")[2])


def _find_port(launch: ServerLaunch) -> int:
    """Return the port that was asked for, or a free one; refuse one on which another server would answer for ours."""
    with socket.socket() as listener:
        if launch.port is not None:  # one that was left a moment ago can be had again
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((launch.host, launch.port or 0))
        except OSError as error:
            raise EngineError(
                f"expected to listen at {launch.host}:{launch.port or 'a free port'}, got: "
                f"{error.strerror}; name another address or port"
            ) from None
        return int(listener.getsockname()[1])
