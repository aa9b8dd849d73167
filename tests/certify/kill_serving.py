"""Defects of what serves a candidate, of the client's clock, and of what is kept of an older candidate."""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from aiohttp import web

from pipeline.products.text.benchmark import rounds
from pipeline.products.text.benchmark.streaming import TimedReply
from pipeline.products.text.serving.engines import transformers
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct
from tests.certify.fault_project import serve_candidate
from tests.certify.fault_rows import silence
from tests.certify.kill_trial import Trial
from tests.fakes.faulty_proxy import CHAT, Exchange, Fault, FaultyProxy, after, at, edit, every

NUM_SOUND = 64  # chats that are let through before answers are swapped: the probes among them
EMPTY_EVERY = 20


def attach(
    fault: Fault | None = None, *, evals: tuple[str, ...] = ("tool_calls",), serves_reference: bool = False
) -> Callable[[Trial], None]:
    """Return what evaluates the candidate as a server of somebody else's, behind a proxy that breaks something."""

    def plant(trial: Trial) -> None:
        trial.keep_evals(*evals)
        with _serve(trial, trial.reference if serves_reference else trial.name) as url, FaultyProxy(url) as proxy:
            proxy.fault = fault
            trial.settings["engine"] = {"kind": "openai", "base_url": proxy.url, "model": trial.name}
            trial.write()
            trial.evaluate()

    return plant


@contextlib.contextmanager
def _serve(trial: Trial, name: str) -> Iterator[str]:
    product = trial.load(TextProduct)
    resources = product.resources.model_copy(update={"num_servers": 1})
    candidate = read_candidate(trial.build, name, product).model_copy(update={"name": trial.name})
    with serve_candidate(candidate, resources, root=trial.root) as url:
        yield url


def cut_answers(num_tokens: int) -> Fault:
    """Answer with at most so many tokens, whatever is asked."""

    def fault(exchange: Exchange) -> Awaitable[web.StreamResponse]:
        asked = exchange.body.get("max_tokens") or num_tokens
        return exchange.forward(max_tokens=min(num_tokens, asked))

    return at(CHAT, fault)


def empty_now_and_then() -> Fault:
    """Make one reply in 20 an empty one."""
    return at(CHAT, every(EMPTY_EVERY, edit(silence)))


def swap_answers() -> Fault:
    """Answer each chat with what belongs to the one before."""
    last: list[dict[str, Any]] = []

    def fault(exchange: Exchange) -> Awaitable[web.StreamResponse]:
        last.append(exchange.body)
        return exchange.forward(messages=last[-2]["messages"]) if len(last) > 1 else exchange.forward()

    return at(CHAT, after(NUM_SOUND, fault))


def launch(module: str) -> Callable[[Trial], None]:
    """Return what evaluates the candidate, built where it is new, on servers that another module starts."""

    def plant(trial: Trial) -> None:
        trial.keep_evals("tool_calls")
        if not (trial.build / "candidates" / trial.name).is_dir():
            trial.optimize()
        with mock.patch.object(transformers, "launcher", importlib.import_module(module)):
            trial.evaluate()

    return plant


def serve_less_at_once(trial: Trial) -> None:
    """Evaluate both sides with a quarter of the requests in flight."""
    trial.section["serving"]["concurrency"] //= 4
    trial.keep_evals("tool_calls")
    trial.evaluate()


def keep_journal(other: str) -> Callable[[Trial], None]:
    """Return what builds other weights, and leaves the journal and the records of the old ones."""

    def plant(trial: Trial) -> None:
        finished = trial.project / trial.build.relative_to(trial.root)
        shutil.copytree(finished / "journal" / trial.name, trial.build / "journal" / trial.name)
        trial.keep_evals("tool_calls")

        def replace_weights(folder: Path) -> None:
            shutil.copytree(finished / "candidates" / other / "checkpoint", folder, dirs_exist_ok=True)

        trial.change_weights(replace_weights)
        trial.evaluate()

    return plant


def time_candidate(
    change: Callable[[int], int] | None = None, clock: Callable[[TimedReply], TimedReply] | None = None
) -> Callable[[Trial], None]:
    """Return what times the candidate, asked for another number of tokens than the reference or by another clock."""
    ask = rounds.ask

    def plant(trial: Trial) -> None:
        async def ask_otherwise(
            http: Any, url: str, model: str, messages: Any, *, num_tokens: int, tools: Any = None
        ) -> TimedReply:
            ours = model == trial.name
            num_tokens = change(num_tokens) if change and ours else num_tokens
            timed = await ask(http, url, model, messages, num_tokens=num_tokens, tools=tools)
            return clock(timed) if clock and ours else timed

        trial.section["benchmark"]["candidates"] = [trial.name]
        trial.write()
        with mock.patch.object(rounds, "ask", ask_otherwise):
            trial.run("benchmark", trial.product)

    return plant


def stop_at_first(timed: TimedReply) -> TimedReply:
    """Read the clock for the last time when the first token is there, and not when all work is done."""
    return replace(timed, inter_token_latency_ms=0.0)
