"""A proxy in front of a real server that breaks, on demand, what a server can break.

Requests go on to the target as they came and its answers come back, until `fault` is set. A fault
sees one exchange and may send it on, change it, answer in the server's place, or send nothing at all.

Not covered: TLS, streaming answers of the target.
"""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

CHAT, SCORE, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
FACTS = "/v1/fingerprint"
TRICKLE_EVERY_S = 0.05


@dataclass(frozen=True)
class Exchange:
    """One request, and how to have the target answer it."""

    request: web.Request
    path: str
    body: dict[str, Any]
    ask: Callable[[dict[str, Any]], Awaitable[tuple[int, bytes]]]

    async def forward(self, **changes: Any) -> web.Response:
        """Answer as the target does; `changes` replace fields of the request, ... removes one."""
        body = {key: value for key, value in (self.body | changes).items() if value is not ...}
        status, content = await self.ask(body)
        return web.Response(status=status, body=content, content_type="application/json")


Fault = Callable[[Exchange], Awaitable[web.StreamResponse]]


class FaultyProxy:
    """A proxy on a free port, in a thread of its own. Use as a context manager."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.fault: Fault | None = None
        self._started, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._http:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")

        async def ask(body: dict[str, Any]) -> tuple[int, bytes]:
            url = self.target + request.path
            async with self._http.request(request.method, url, json=body or None) as response:
                return response.status, await response.read()

        if request.path == FACTS:
            raise web.HTTPNotFound  # a server of somebody else's does not say what it is
        exchange = Exchange(request, request.path, body, ask)
        return await (self.fault(exchange) if self.fault else exchange.forward())


# Faults: each breaks every exchange that it is given.


async def pass_on(exchange: Exchange) -> web.StreamResponse:
    """Break nothing."""
    return await exchange.forward()


def say(status: int, content: Any, **headers: str) -> Fault:
    """Answer with this, bytes as they are and anything else as JSON."""

    async def fault(exchange: Exchange) -> web.StreamResponse:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=body, headers=lines)

    return fault


async def say_retry_at(exchange: Exchange) -> web.StreamResponse:
    """Answer 429 with a date one to two seconds ahead: a date has whole seconds."""
    date = email.utils.formatdate(time.time() + 2, usegmt=True)
    return await say(429, {"error": "slow down"}, retry_after=date)(exchange)


async def trickle(exchange: Exchange) -> web.StreamResponse:
    """Send the head of an answer, and then a byte now and then for ever."""
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(exchange.request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(TRICKLE_EVERY_S)


async def hang(exchange: Exchange) -> web.StreamResponse:
    """Send nothing for ever; whoever asked will leave."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def cut(exchange: Exchange) -> web.StreamResponse:
    """Send half of the answer, and close the connection."""
    content = (await exchange.forward()).body
    assert isinstance(content, bytes) and exchange.request.transport is not None
    response = web.StreamResponse(headers={"content-length": str(len(content))})
    await response.prepare(exchange.request)
    await response.write(content[: len(content) // 2])
    exchange.request.transport.close()
    return response


def ask_instead(**changes: Any) -> Fault:
    """Have the target answer another request: a field that is changed or left out was ignored."""
    return lambda exchange: exchange.forward(**changes)


async def sample(exchange: Exchange) -> web.StreamResponse:
    """Answer the same request otherwise each time, as a server does that ignores the temperature."""
    *earlier, last = exchange.body["messages"]
    said = f"{last['content']} {next(_numbers)}"
    return await exchange.forward(messages=[*earlier, {**last, "content": said}])


_numbers = itertools.count()


def edit(change: Callable[[Any], Any]) -> Fault:
    """Answer what `change` makes of the target's JSON."""

    async def fault(exchange: Exchange) -> web.StreamResponse:
        content = (await exchange.forward()).body
        assert isinstance(content, bytes)
        return web.json_response(change(json.loads(content)))

    return fault


# When and where a fault strikes.


def at(path: str, fault: Fault) -> Fault:
    """Break one path."""
    return lambda exchange: fault(exchange) if exchange.path == path else exchange.forward()


def where(picks: Callable[[Exchange], bool], fault: Fault) -> Fault:
    """Break the exchanges that are picked."""
    return lambda exchange: fault(exchange) if picks(exchange) else exchange.forward()


def after(count: int, fault: Fault) -> Fault:
    """Let so many exchanges through, and break all others once these are answered."""
    numbers, num_answered, are_answered = itertools.count(1), itertools.count(1), asyncio.Event()

    async def broken(exchange: Exchange) -> web.StreamResponse:
        if next(numbers) > count:
            await are_answered.wait()
            return await fault(exchange)
        try:
            return await exchange.forward()
        finally:
            if next(num_answered) == count:
                are_answered.set()

    return broken


def every(count: int, fault: Fault) -> Fault:
    """Break one exchange in so many, and none twice: tries in step with the count would all be broken."""
    numbers, broken = itertools.count(1), set()

    def pick(exchange: Exchange) -> Awaitable[web.StreamResponse]:
        body = json.dumps(exchange.body)
        if next(numbers) % count or body in broken:
            return exchange.forward()
        broken.add(body)
        return fault(exchange)

    return pick
