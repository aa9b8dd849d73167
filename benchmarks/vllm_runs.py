"""What `vllm_on_gpu` measures of one running vLLM: speed by requests in flight, answers, drafts, memory."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from pipeline.products.text.benchmark.streaming import TimedReply, ask
from pipeline.products.text.serving.client import Client, Reply
from pipeline.products.text.serving.engines.engine import Engine
from pipeline.records.differences import classify_difference

NUM_WORDS = 64  # of a prompt: random ones, so that none is in a cache of prompts
ANSWER_TOKENS = 64  # of an answer that is compared with another path's
_COUNTERS = {
    "steps": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
# 4 GiB there and back, best of 10: each byte is read once and written once
_COPY = """
import torch
a = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda"); b = torch.empty_like(a); times = []
for _ in range(11):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(); b.copy_(a); end.record(); torch.cuda.synchronize(); times.append(start.elapsed_time(end))
print(2 * a.nbytes / min(times[1:]) / 1e6)
"""


def measure_copy_gb_per_s() -> float | None:
    """Return what a copy on the GPU moves, in a process that has left before a server starts; None without a GPU."""
    child = subprocess.run([sys.executable, "-c", _COPY], capture_output=True, text=True)
    return float(child.stdout) if child.returncode == 0 else None


def make_prompts(number: int, *, seed: int) -> list[list[dict[str, str]]]:
    """Return conversations of one turn of random words each."""
    letters = random.Random(seed)
    words = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(3, 8))) for _ in range(2000)]
    return [[{"role": "user", "content": " ".join(letters.choices(words, k=NUM_WORDS))}] for _ in range(number)]


async def measure_speed(engine: Engine, *, concurrency: int, num_tokens: int, seed: int) -> dict[str, Any]:
    """Time a batch of requests, so many in flight, after another one that warms up; each must do the asked work."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:
        await _answer_all(http, engine, make_prompts(concurrency, seed=seed), concurrency, num_tokens=16)
        prompts = make_prompts(max(4, 2 * concurrency), seed=seed + 1)
        start = time.perf_counter()
        timed = await _answer_all(http, engine, prompts, concurrency, num_tokens=num_tokens)
        seconds = time.perf_counter() - start
    counts = [t.reply.num_completion_tokens for t in timed]
    return {
        "in_flight": concurrency,
        "tokens_per_s": round(sum(counts) / seconds, 1),
        "ttft_ms": round(statistics.median(t.ttft_ms for t in timed), 2),
        "itl_ms": round(statistics.median(t.inter_token_latency_ms for t in timed), 3),
        "num_requests": len(timed),
        "num_as_asked": sum(count == num_tokens for count in counts),
        "num_distinct": len({t.reply.text for t in timed}),
        "prompt_tokens": [f(t.reply.num_prompt_tokens for t in timed) for f in (min, max)],
    }


async def _answer_all(
    http: aiohttp.ClientSession, engine: Engine, prompts: Sequence[Any], concurrency: int, *, num_tokens: int
) -> list[TimedReply]:
    queue, timed = iter(prompts), []

    async def work() -> None:
        for prompt in queue:
            timed.append(await ask(http, engine.base_urls[0], engine.model, prompt, num_tokens=num_tokens))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return timed


async def answer(client: Client, prompts: Sequence[Any]) -> list[Reply]:
    """Return the greedy answers with their token ids, all in flight at once as far as the client lets them."""
    asked = (client.chat(prompt, max_tokens=ANSWER_TOKENS, return_token_ids=True) for prompt in prompts)
    return list(await asyncio.gather(*asked))


def compare_answers(first: Sequence[Reply], second: Sequence[Reply]) -> dict[str, Any]:
    """Count the prompts that were answered in other tokens, and by kind in other words."""
    pairs = list(zip(first, second, strict=True))
    kinds = Counter(classify_difference(a.text, b.text) for a, b in pairs if a.text != b.text)
    return {
        "num_prompts": len(pairs),
        "num_other_tokens": sum(a.token_ids != b.token_ids for a, b in pairs),
        "kinds": dict(sorted((str(kind), count) for kind, count in kinds.items())),
    }


async def read_drafts(engine: Engine) -> dict[str, float]:
    """Return the counters of speculation since the start; empty where nothing is drafted."""
    async with aiohttp.ClientSession() as http, http.get(f"{engine.base_urls[0]}/metrics") as response:
        return parse_drafts(await response.text())


def parse_drafts(text: str) -> dict[str, float]:
    """Read the counters of speculation from Prometheus text: drafted tokens, accepted ones, and the steps they took."""
    totals = {
        name: sum(float(v) for v in re.findall(rf"^{re.escape(counter)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))
        for name, counter in _COUNTERS.items()
    }
    if not totals["drafted"]:
        return {}
    return totals | {"acceptance": round(totals["accepted"] / totals["drafted"], 4)}


def count_weight_bytes(folder: Path, *, linear_bytes: float | None = None) -> int:
    """Return the bytes of weights that decoding one token reads: of an input embedding with a head of its own one row.

    Args:
        folder: the checkpoint.
        linear_bytes: of a weight of the decoder's linear layers, where the engine converts them; None: as stored.
    """
    tensors = dict(_read_headers(folder))
    has_head = any(name.endswith("lm_head.weight") for name in tensors)
    total = 0.0
    for name, (shape, size) in tensors.items():
        if has_head and name.endswith("embed_tokens.weight"):
            total += size / shape[0]
        elif linear_bytes is not None and ".layers." in name and len(shape) == 2:
            total += shape[0] * shape[1] * linear_bytes
        else:
            total += size
    return round(total)


def _read_headers(folder: Path) -> Iterator[tuple[str, tuple[list[int], int]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, info in header.items():
            if name != "__metadata__":
                start, end = info["data_offsets"]
                yield name, (info["shape"], end - start)
