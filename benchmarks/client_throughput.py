"""Throughput of the eval client against the most that the engine gives: `python -m benchmarks.client_throughput`.

The same prompts two ways, interleaved: asked as the evaluate stage asks tool calls (the eval, the one client,
HTTP, one embedded server, the journal), and given as token ids straight to the continuous batching of an engine
in a process of its own, without HTTP, chat template and tokenising. Both engines load the reference's checkpoint
and are set up as params.yaml says, with as many requests in flight. Prompts are the shipped tool calls and the
first turns of the shipped workflows, each asked once per engine: the first part warms up, every round has
fresh ones, so both ways find the same prefixes cached.

Prints completion tokens per second of wall time and their ratio, and what a token costs in CPU seconds of each
process. Wall time is fair only on an idle machine with a core for each of client and server; the ratio of the
engines' CPU seconds per token is fair on a busy one as well. Ends with 1 when the two ways gave other answers.

    python -m benchmarks.client_throughput [--rounds 5] [--product NAME]

Not covered: several servers, scoring of given tokens, later turns, whose prompts depend on the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.check_resume import list_children
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.evalsets.cases import Call, ToolCallCase
from pipeline.products.params import choose_product, load_params
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.evals import tool_calls
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.places import Places
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.serving_config import serve
from pipeline.products.text.settings import TextProduct, ToolCallsEval
from pipeline.records.evaluations import BuiltCandidate, Candidate
from pipeline.running.journal import Journal

SETTINGS = ToolCallsEval(kind="tool_calls", evalset="evalsets/tool_calls")
Cases = tuple[ToolCallCase, ...]


@dataclass(frozen=True)
class Round:
    """What one way came to in one round."""

    answers: dict[str, str]  # by case
    num_tokens: dict[str, int]
    wall_s: float
    engine_s: float  # CPU seconds of the process that generates
    client_s: float = 0.0  # and of the one that asks

    @property
    def total(self) -> int:
        """Completion tokens."""
        return sum(self.num_tokens.values())

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of wall time."""
        return self.total / self.wall_s


class DirectEngine:
    """The engine in a process of its own that is told cases through a pipe."""

    def __init__(self, product: str) -> None:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.client_throughput", "--engine", "--product", product],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | threads | {"TRANSFORMERS_VERBOSITY": "error"},
        )
        self.ask(())

    def ask(self, cases: Cases) -> Round:
        """Have it answer cases; what it measures starts when all prompts are tokenised."""
        assert self._process.stdin is not None and self._process.stdout is not None
        chats = {case.id: [m.model_dump() for m in case.messages] for case in cases}
        self._process.stdin.write(json.dumps(chats).encode() + b"\n")
        self._process.stdin.flush()
        return Round(**json.loads(self._process.stdout.readline()))

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


async def run_engine(candidate: Candidate) -> None:
    """Be the other end of `DirectEngine`: answer each line of stdin with one of stdout."""
    import gc

    from pipeline.products.text.serving.app import Server
    from pipeline.products.text.serving.loading import load_candidate

    loaded = load_candidate(candidate, Path(candidate.checkpoint.path))
    server = Server(loaded)
    await server.probe()
    gc.freeze()  # as the launcher does
    config = server._generation_config(max_new_tokens=candidate.serving.max_tokens)
    for number, line in enumerate(sys.stdin):
        chats = json.loads(line)
        prompts = {
            name: loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
            for name, chat in chats.items()
        }
        answers: dict[str, str] = {}
        num_tokens: dict[str, int] = {}

        async def work(
            queue: Iterator[str],
            number: int = number,
            prompts: Any = prompts,
            answers: Any = answers,
            num_tokens: Any = num_tokens,
        ) -> None:
            for name in queue:
                answers[name], _, tokens = await server._manager.generate_non_streaming(
                    loaded.model,
                    loaded.tokenizer,
                    {"input_ids": prompts[name]["input_ids"]},
                    config,
                    request_id=f"{number}-{name}",
                )
                num_tokens[name] = len(tokens)

        start, cpu, queue = time.perf_counter(), time.process_time(), iter(prompts)
        await asyncio.gather(*(work(queue) for _ in range(candidate.serving.concurrency)))
        result = Round(answers, num_tokens, time.perf_counter() - start, time.process_time() - cpu)
        print(json.dumps(vars(result)), flush=True)
    os._exit(0)  # the generation thread is no daemon


async def ask_through_client(cases: Cases, client: Client, server: int, candidate: Candidate, folder: Path) -> Round:
    """Ask cases as the evaluate stage does."""
    evalset = load_evalset(Path(SETTINGS.evalset)).model_copy(update={"cases": cases})
    start, cpu, server_cpu = time.perf_counter(), time.process_time(), read_cpu_s(server)
    with Journal(folder / "journal.jsonl", fingerprint="", key="") as journal:
        records = await tool_calls.evaluate(
            EvalContext(
                name="tool_calls",
                settings=SETTINGS,
                evalset=evalset,
                client=client,
                journal=journal,
                checkpoint=Path(candidate.checkpoint.path),
                folder=folder,
                places=Places(candidate.serving.concurrency),
                max_tokens=candidate.serving.max_tokens,
                context_length=candidate.serving.context_length,
                fingerprint="",
            )
        )
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    if failed := next((r for r in records if r.failure), None):
        sys.exit(f"expected every case to be judged, {failed.case_id} was not: {failed.failure}")
    return Round(
        {r.case_id: r.output for r in records},
        {r.case_id: r.num_completion_tokens for r in records},
        wall,
        read_cpu_s(server) - server_cpu,
        cpu,
    )


def read_cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, user and system, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def describe_candidate(product: TextProduct) -> Candidate:
    """Return the reference's checkpoint as the embedded engine serves it."""
    checkpoint = read_checkpoint(Path(product.candidates[product.reference].checkpoint), root=Path())
    return serve(BuiltCandidate(name=product.reference, checkpoint=checkpoint), product)


def read_prompts() -> dict[str, Cases]:
    """Return the cases of each kind; a workflow's first turn is asked as a tool call, whatever it should be."""
    workflows: Evalset = load_evalset(Path("evalsets/workflows"))
    turns = tuple(
        ToolCallCase(id=case.id, cluster=case.cluster, messages=case.messages, expected=Call(name="", arguments={}))
        for case in workflows.cases
    )
    return {"tool calls": load_evalset(Path(SETTINGS.evalset)).cases, "first turns of workflows": turns}


async def measure(product: TextProduct, num_rounds: int) -> dict[str, list[tuple[Round, Round]]]:
    """Return what both ways came to, the client's first, by kind of prompt and round."""
    candidate = describe_candidate(product)
    resources = product.resources.model_copy(update={"num_servers": 1})
    rounds: dict[str, list[tuple[Round, Round]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        async with start_engine(
            candidate, resources, evals={"tool_calls": SETTINGS}, root=Path(), logs=Path(temporary)
        ) as (_, client):
            # ps is among the children that it lists, and has ended by now
            (server,) = [pid for pid in list_children(os.getpid()) if Path(f"/proc/{pid}").exists()]
            engine = DirectEngine(product.name)
            for kind, cases in read_prompts().items():
                # every so manyth case, so that rounds are alike; the first part warms up
                for number in range(num_rounds + 1):
                    part = cases[number :: num_rounds + 1]
                    folder = Path(temporary) / f"{kind}-{number}"
                    # either way goes first every other time
                    direct = engine.ask(part) if number % 2 else None
                    ours = await ask_through_client(part, client, server, candidate, folder)
                    rounds.setdefault(kind, []).append((ours, direct or engine.ask(part)))
            engine.stop()
    return {kind: found[1:] for kind, found in rounds.items()}


def describe(values: list[float], form: str) -> str:
    """Return median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def report(kind: str, rounds: list[tuple[Round, Round]]) -> bool:
    """Print what was found; return whether both ways gave the same answers."""
    num_cases = sum(len(ours.answers) for ours, _ in rounds)
    ours_total, direct_total = (sum(pair[side].total for pair in rounds) for side in (0, 1))
    other = [
        name
        for ours, direct in rounds
        for name, text in direct.answers.items()
        if (ours.answers[name], ours.num_tokens[name]) != (text.replace("\n", "\\n"), direct.num_tokens[name])
    ]
    print(
        f"{kind}: {num_cases} cases in {len(rounds)} rounds, {ours_total} completion tokens through the client, "
        f"{direct_total} straight from the engine, {len(other)} answers differ {other[:3] or ''}"
    )
    for name, side in (("client", 0), ("engine", 1)):
        print(
            f"  {name}: {describe([pair[side].tokens_per_s for pair in rounds], '.0f')} tokens/s of wall time, "
            f"{describe([1e3 * pair[side].engine_s / pair[side].total for pair in rounds], '.3f')} "
            "CPU ms per token in the engine's process"
        )
    print(
        f"  asking: {describe([1e3 * ours.client_s / len(ours.answers) for ours, _ in rounds], '.2f')} "
        "CPU ms per case in the client's process"
    )
    walls = [ours.tokens_per_s / direct.tokens_per_s for ours, direct in rounds]
    costs = [(direct.engine_s / direct.total) / (ours.engine_s / ours.total) for ours, direct in rounds]
    print(
        f"  client against engine: {describe(walls, '.2f')} in wall time; "
        f"{describe(costs, '.2f')} by the engine's CPU seconds per token",
        flush=True,
    )
    return not other


def main() -> int:
    """Measure and print; 1 when the two ways gave other answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--product", help="of kind text; needed where there are several")
    arguments = parser.parse_args()
    product = choose_product(load_params(), arguments.product, kind=TextProduct)
    if arguments.engine:
        asyncio.run(run_engine(describe_candidate(product)))
    rounds = uvloop.run(measure(product, arguments.rounds))
    return 0 if all([report(*item) for item in rounds.items()]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
