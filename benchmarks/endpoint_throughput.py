"""Tokens a second through the embedded endpoint, against the library's continuous batching in a process of its own.

    python -m benchmarks.endpoint_throughput --checkpoint FOLDER [--dtype bfloat16] [--in-flight 64] [--tokens 128]
        [--prompt-tokens 64] [--rounds 3] [--limit-s 180] [--choices 1000]
        [--library "use_cuda_graph=true,max_batch_tokens=512"]...

FOLDER is any checkpoint with a chat template, such as `benchmarks.language_models` writes. Both ways answer the same
fresh prompts in each round, all of them in flight at once, each with exactly as many tokens. The first round warms up.
`--library` names fields of transformers' ContinuousBatchingConfig, and `attention`; several may be given, in place of
the three that are tried otherwise. A configuration that fails or takes longer than `--limit-s` is reported as such.
`--endpoint` does the same for the endpoint: its settings `use_cuda_graph` and `max_batch_tokens`. `--choices` also
scores so many answers, four to a question of `--prompt-tokens`, through the eval client, as an lm-eval task does.

Prints the best round of each, the share of time in which the GPU was busy, its memory, and how many tokens of an answer
are the endpoint's own until the first other one. In half precision rounding parts them somewhere. Ends with 1 when
the endpoint gives less than `--floor` of the library's best configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_use import parse_use, start_nvidia_smi
from pipeline.errors import EngineError

LIBRARY: tuple[dict[str, Any], ...] = (
    {"block_size": 16, "num_blocks": 2048, "max_batch_tokens": 512, "use_cuda_graph": True},
    {"block_size": 16, "num_blocks": 2048, "max_batch_tokens": 512, "use_cuda_graph": False},
    {},  # the library's own defaults
)
WORDS = "the courier takes twelve parcels to gate before noon and brings a list of apples back from market".split()
SAMPLE_MS = 100
ANSWERS = "answers.json"  # the endpoint's of the last round


@dataclass(frozen=True)
class Speed:
    """One way of answering."""

    name: str
    tokens_per_s: tuple[float, ...] = ()  # by round, without the first
    busy: float | None = None  # share of the time in which some kernel ran
    memory_gib: float | None = None  # of the GPU at most
    problem: str = ""
    agreement: float | None = None  # share of an answer's tokens before the first that is not the endpoint's

    @property
    def best(self) -> float:
        """The best round; 0 when there is none."""
        return max(self.tokens_per_s, default=0.0)


class GpuSampler:
    """Asks nvidia-smi how busy the GPU is, in a process beside; nothing where there is none."""

    def __init__(self) -> None:
        self._process = start_nvidia_smi(SAMPLE_MS)

    def stop(self) -> dict[str, float | None]:
        """Return the mean share of busy time and the most memory since the start, over all GPUs that are seen."""
        if self._process is None:
            return {"busy": None, "memory_gib": None}
        self._process.terminate()
        text, _ = self._process.communicate()
        rows = [use for line in text.splitlines() if (use := parse_use(line))]
        if not rows:
            return {"busy": None, "memory_gib": None}
        return {"busy": sum(row[0] for row in rows) / len(rows) / 100, "memory_gib": max(row[1] for row in rows) / 1024}


def make_prompts(tokenizer: Any, count: int, num_tokens: int, seed: int) -> list[tuple[str, list[int]]]:
    """Return texts, and the token ids that the chat template makes of each: at least `num_tokens`, by few."""
    generator = random.Random(seed)
    prompts = []
    for _ in range(count):
        words: list[str] = []
        ids: list[int] = []
        while len(ids) < num_tokens:
            words += generator.choices(WORDS, k=max(1, (num_tokens - len(ids)) // 2))
            chat = [{"role": "user", "content": " ".join(words)}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompts.append((" ".join(words), ids))
    return prompts


def run_library(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Answer by the library alone in this process, and print one JSON object a round."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    attention = settings.pop("attention", "sdpa")
    if attention == "paged|varlen":
        from pipeline.products.text.serving import varlen_attention

        varlen_attention.register()
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=arguments.dtype)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    model.set_attn_implementation(attention)
    config = GenerationConfig(max_new_tokens=arguments.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(**settings)
    for number in range(arguments.rounds + 1):
        prompts = make_prompts(tokenizer, arguments.in_flight, arguments.prompt_tokens, number)
        sampler, start = GpuSampler(), time.perf_counter()
        answers = model.generate_batch(
            [ids for _, ids in prompts],
            generation_config=config,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - start
        lengths = {len(output.generated_tokens) for output in answers.values()}
        if len(answers) != len(prompts) or lengths != {arguments.tokens}:
            sys.exit(f"expected {len(prompts)} answers of {arguments.tokens} tokens, got {len(answers)} of {lengths}")
        result = {"tokens_per_s": len(prompts) * arguments.tokens / seconds, **sampler.stop()}
        if (file := arguments.logs / ANSWERS).is_file() and number == arguments.rounds:
            ours = [output.generated_tokens for output in answers.values()]
            result["agreement"] = measure_agreement(json.loads(file.read_text(encoding="utf-8")), ours)
        print(json.dumps(result), flush=True)
    os._exit(0)  # the generation thread is no daemon


def measure_agreement(answers: list[list[int]], others: list[list[int]]) -> float:
    """Return which share of an answer's tokens comes before the first that differs, on average."""
    shares = []
    for one, other in zip(answers, others, strict=True):
        differing = (i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        shares.append(next(differing, len(one)) / len(one))
    return sum(shares) / len(shares)


def measure_library(arguments: argparse.Namespace, settings: dict[str, Any]) -> Speed:
    """Run a configuration of the library in a process of its own, for a limited time."""
    name = "library " + (", ".join(f"{key}={value}" for key, value in settings.items()) or "defaults")
    command = [sys.executable, "-m", "benchmarks.endpoint_throughput", *sys.argv[1:], "--run", json.dumps(settings)]
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        problem = ""
        try:
            text, _ = process.communicate(timeout=arguments.limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            problem = f"not done after {arguments.limit_s:g} s"
        log.seek(0)
        lines = log.read().strip().splitlines()
    if process.returncode and not problem:
        problem = lines[-1][:200] if lines else f"exit code {process.returncode}"
    rounds = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return build_speed(name, rounds[1:], problem)


def build_speed(name: str, rounds: list[dict[str, Any]], problem: str = "") -> Speed:
    """Sum up rounds; busy is that of the best one."""
    if not rounds:
        return Speed(name, problem=problem or "no round was timed")
    best = max(rounds, key=lambda each: each["tokens_per_s"])
    speeds = tuple(r["tokens_per_s"] for r in rounds)
    return Speed(name, speeds, best["busy"], best["memory_gib"], problem, rounds[-1].get("agreement"))


async def measure_endpoint(arguments: argparse.Namespace, settings: dict[str, Any]) -> Speed:
    """Start the embedded engine and ask it as many requests at once as are in flight."""
    import aiohttp
    from transformers import AutoTokenizer

    from pipeline.products.text.checkpoints import read_checkpoint
    from pipeline.products.text.serving.engines.registry import start_engine
    from pipeline.products.text.settings import ResourceSettings, ToolCallsEval
    from pipeline.records.evaluations import Candidate
    from pipeline.records.serving import ServingConfig

    folder = arguments.checkpoint.resolve()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    serving = ServingConfig(
        dtype=arguments.dtype,
        concurrency=arguments.in_flight,
        num_threads=arguments.threads,
        context_length=arguments.prompt_tokens + max(arguments.tokens, 16) + 48,
        max_tokens=arguments.tokens,
        options=settings,
    )
    candidate = Candidate(
        name="model", checkpoint=read_checkpoint(folder, root=folder.parent), serving=serving, libraries={}
    )
    resources = ResourceSettings(num_servers=1, request_timeout_s=600, start_timeout_s=600)
    evals = {"calls": ToolCallsEval(kind="tool_calls", evalset="")}
    body = {
        "model": "model",
        "temperature": 0,
        "max_tokens": arguments.tokens,
        "min_tokens": arguments.tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    async def ask(http: aiohttp.ClientSession, url: str, text: str) -> list[int]:
        message = {"role": "user", "content": text}
        async with http.post(f"{url}/v1/chat/completions", json={**body, "messages": [message]}) as response:
            answer = await response.json(content_type=None)
        if response.status != 200:
            raise EngineError(f"HTTP {response.status}: {answer}")
        return list(answer["choices"][0]["token_ids"])

    rounds = []
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)) as http,
        start_engine(candidate, resources, evals=evals, root=folder.parent, logs=arguments.logs) as (engine, client),
    ):
        facts = engine.facts["engine"]
        print({key: facts[key] for key in ("attention", "use_cuda_graph", "use_async_batching", "max_batch_tokens")})
        for number in range(arguments.rounds + 1):
            prompts = make_prompts(tokenizer, arguments.in_flight, arguments.prompt_tokens, number)
            sampler, start = GpuSampler(), time.perf_counter()
            answers = await asyncio.gather(*(ask(http, engine.base_urls[0], text) for text, _ in prompts))
            rounds.append({"tokens_per_s": sum(map(len, answers)) / (time.perf_counter() - start), **sampler.stop()})
        (arguments.logs / ANSWERS).write_text(json.dumps(answers), encoding="utf-8")
        if arguments.choices:
            print(await score_choices(client, tokenizer, arguments), flush=True)
    name = "endpoint" + "".join(f", {key}={value}" for key, value in settings.items())
    return build_speed(name, rounds[1:])


async def score_choices(client: Any, tokenizer: Any, arguments: argparse.Namespace) -> str:
    """Score the answers to questions twice, and say how long the second time took."""
    for seed in (100, 200):  # the first one loads kernels
        questions = make_prompts(tokenizer, -(-arguments.choices // 4), arguments.prompt_tokens, seed)
        generator = random.Random(seed)
        choices = [[*ids, *generator.choices(ids, k=8)] for _, ids in questions for _ in range(4)]
        sampler, start = GpuSampler(), time.perf_counter()
        await client.score(choices, top_logprobs=1)
        seconds, gpu = time.perf_counter() - start, sampler.stop()
    num_tokens = sum(map(len, choices))
    busy = "n/a" if gpu["busy"] is None else f"{gpu['busy']:.0%}"
    return f"{len(choices)} choices of {num_tokens} tokens: {seconds:.2f} s, {num_tokens / seconds:.0f}/s, busy {busy}"


def read_settings(text: str) -> dict[str, Any]:
    """Read `name=value,name=value`; values are JSON, or plain words."""
    settings = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        settings[name.strip()] = value
    return settings


def measure_all(arguments: argparse.Namespace) -> Iterator[Speed]:
    """Measure the endpoint, then the library; a failure is a result."""
    for settings in arguments.endpoint or [{}]:
        try:
            yield asyncio.run(measure_endpoint(arguments, settings))
        except EngineError as error:
            yield Speed("endpoint", problem=str(error))
    for settings in arguments.library or LIBRARY:
        yield measure_library(arguments, settings)


def format_speed(speed: Speed) -> str:
    """Return one row."""
    busy = "n/a" if speed.busy is None else f"{speed.busy:.0%}"
    memory = "n/a" if speed.memory_gib is None else f"{speed.memory_gib:.1f} GiB"
    agreement = "" if speed.agreement is None else f"agrees {speed.agreement:.0%} "
    rounds = " ".join(f"{value:.0f}" for value in speed.tokens_per_s)
    return (
        f"{speed.best:9.0f} tokens/s  busy {busy:>4}  {memory:>9}  {agreement}{speed.name}  [{rounds}] {speed.problem}"
    )


def main() -> int:
    """Measure and print; 1 when the endpoint is too slow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=180)
    parser.add_argument("--floor", type=float, default=0.8)
    parser.add_argument("--choices", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "endpoint-throughput")
    parser.add_argument("--library", type=read_settings, action="append")
    parser.add_argument("--endpoint", type=read_settings, action="append")
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        run_library(arguments, arguments.run)
    speeds = []
    for speed in measure_all(arguments):
        print(format_speed(speed), flush=True)
        speeds.append(speed)
    ours = max(s.best for s in speeds if s.name.startswith("endpoint"))
    library = max(s.best for s in speeds if s.name.startswith("library"))
    if not library:
        return 1
    print(f"endpoint against the library's best: {ours / library:.2f}")
    return int(ours < arguments.floor * library)


if __name__ == "__main__":
    raise SystemExit(main())
