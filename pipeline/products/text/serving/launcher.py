"""One embedded server: `python -m pipeline.products.text.serving.launcher '<json>'`.

Loads a checkpoint once and serves it. Announces itself with one JSON line on stdout once a probe has
been answered. Ends when its stdin closes, which happens when the parent ends in whatever way, and when its
device fails. Logs go to stderr; the last line says in JSON why a server ended by itself.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop

from pipeline.errors import EngineError, QuantgateError
from pipeline.products.text.serving.engines.processes import FAILURE
from pipeline.records.evaluations import Candidate
from pipeline.running.gpu_failures import describe_gpu_failure

if TYPE_CHECKING:
    from pipeline.products.text.serving.app import Server

WATCH_S = 0.2
GARBAGE_AFTER = 10_000  # objects; Python's 700 have it look for garbage twenty times a second: 1 % of the time


def _end_with_parent() -> None:
    """End this process as soon as stdin closes; the parent holds its other end."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


async def _serve(candidate: Candidate, asked: dict[str, Any], listener: socket.socket) -> None:
    # transformers imports them where it can, for adaptive draft lengths, the losses of object detectors and a format
    # of checkpoints, which this server does not offer: more than a second of CPU time for each server
    for package in ("sklearn", "scipy", "torchao"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    gc.disable()  # looking for garbage takes a quarter of the time of the imports, and they leave none
    import uvicorn

    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    loaded = load_candidate(
        candidate,
        Path(asked["checkpoint_folder"]),
        draft_folder=Path(asked["draft_folder"]) if asked["draft_folder"] else None,
        num_sharing=asked.get("num_sharing", 1),
        kv_cache_gib=asked.get("kv_cache_gib"),
    )
    server = Server(loaded, trace=Path(asked["trace"]) if asked.get("trace") else None)
    await server.probe()
    gc.freeze()  # what is there now stays: no later collection need look at it
    gc.set_threshold(GARBAGE_AFTER)
    gc.enable()
    config = uvicorn.Config(server.build_app(), http="httptools", log_level="warning", access_log=False, lifespan="off")
    line = {
        "port": listener.getsockname()[1],
        "fingerprint": loaded.fingerprint,
        "facts": loaded.facts,
        "config": loaded.config,
    }
    print(json.dumps(line), flush=True)
    watch = asyncio.create_task(_end_on_failure(server))
    await uvicorn.Server(config).serve(sockets=[listener])
    watch.cancel()


async def _end_on_failure(server: Server) -> None:
    """End this process when its device or its generation thread has failed: a client that asks again would wait."""
    try:
        while (failure := server.find_failure()) is None:
            await asyncio.sleep(WATCH_S)
    except Exception as error:  # nobody awaits this task: its error would be lost, and the watch with it
        failure = f"{server.loaded.name}: looking for failures: {type(error).__name__}: {error}"
    _end(failure)


def _end(failure: str) -> NoReturn:
    """End with the line that whoever started this process shows (`engines/processes.py`)."""
    print(json.dumps({FAILURE: failure}), file=sys.stderr, flush=True)
    os._exit(1)  # the generation thread is not a daemon and would keep the process alive


def _listen(host: str, port: int | None) -> socket.socket:
    """Take the port before the model is loaded, which is what takes time."""
    listener = socket.socket()
    if port is not None:  # one that was left a moment ago can be had again
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port or 0))  # port 0: the system picks a free one, so no port can be taken
        listener.listen(512)
    except OSError as error:
        raise EngineError(
            f"expected to listen at {host}:{port or 'a free port'}, got: {error.strerror}; name another address or port"
        ) from None
    return listener


def main(argv: list[str]) -> int:
    """Load, probe, announce and serve until the parent goes away.

    Args:
        argv: one JSON object: `checkpoint_folder`, `draft_folder` or null, and `candidate` as a record. The
            candidate's name is the model name that clients must send. `host` may be missing, for the local
            address, and so may `port`, or be null, for a free one, and `num_sharing` and `kv_cache_gib`, as in
            `load_candidate`. `trace` may be missing or null, or the file for a trace.
    """
    asked = json.loads(argv[0])
    _end_with_parent()
    try:
        listener = _listen(asked.get("host", "127.0.0.1"), asked.get("port"))
        candidate = Candidate.model_validate(asked["candidate"])
        uvloop.run(_serve(candidate, asked, listener))
    except QuantgateError as error:
        _end(str(error))
    except Exception as error:
        name, remedy = asked["candidate"]["name"], "serve weights of fewer bits, or use a GPU with more memory"
        if problem := describe_gpu_failure(error, remedy=remedy):
            _end(f"{name}: loading {asked['checkpoint_folder']}: {problem}")
        traceback.print_exc()
        _end(f"{name}: {type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
