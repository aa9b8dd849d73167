"""The routes by which an embedded server traces itself: `POST /start_profile` and `/stop_profile`, as vLLM names them.

One client (`pipeline/products/text/evals/trace.py`) so traces both. A server has them only where it was started with
a file for its trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipeline.errors import EngineError
from pipeline.running.tracing import start_profiler, stop_profiler


def build_routes(path: Path) -> list[Route]:
    """Return the routes of a server that traces itself.

    Args:
        path: file for the trace; a later one takes its place.
    """
    profilers: list[Any] = []

    async def start(request: Request) -> Response:
        if profilers:
            return Response("a trace is being recorded", 409)
        profilers.append(start_profiler())
        return Response()

    async def stop(request: Request) -> Response:
        if not profilers:
            return Response("no trace is being recorded", 409)
        try:
            stop_profiler(profilers.pop(), path)  # in the thread that started it, as the profiler wants it
        except EngineError as error:
            return Response(str(error), 500)
        return Response()

    return [Route("/start_profile", start, methods=["POST"]), Route("/stop_profile", stop, methods=["POST"])]
