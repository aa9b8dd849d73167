"""What speculative decoding changes and costs: the same prompts with and without drafts, in one process.

The prompts are those of shipped tool calls and of every turn of shipped workflows, as the target itself
plays them in float32. Each prompt goes through all settings in turn, so that they share the machine's
weather. Target-only decoding is the plain serial `generate` that speculation builds on, one thread; time is
the process's CPU seconds in `generate`, prefill included.

    python -m benchmarks.speculation [--calls 150] [--workflows 60]

Not covered: HTTP, several requests at once, sampling. What continuous batching makes of the same prompts is
in `dvc repro`'s own log.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints import describe_checkpoint
from pipeline.evals import tool_calls, trajectories
from pipeline.evals.context import EvalContext
from pipeline.evals.journal import Journal
from pipeline.evalsets import Evalset, load_evalset
from pipeline.params import ToolCallsEval, TrajectoriesEval
from pipeline.records import Candidate, ServingConfig, SpeculationCounts, SpeculativeConfig, sum_speculation
from pipeline.serving.client import Reply
from pipeline.serving.loading import LoadedModel, load_candidate
from pipeline.serving.speculation import SpeculativeManager

TARGET, DRAFT = Path("models/agent"), Path("models/agent-draft")
MAX_TOKENS = 64
METHODS = (("target only", None), *((f"draft, k = {k}", ("draft_model", k)) for k in (2, 5, 8)),
           ("prompt lookup, k = 5", ("prompt_lookup", 5)))  # fmt: skip
Decode = Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, SpeculationCounts | None]]


@dataclass
class Setting:
    """One way to decode, and what it came to."""

    dtype: str
    name: str
    decode: Decode
    answers: list[list[int]] = field(default_factory=list)
    counts: list[SpeculationCounts | None] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, inputs: dict[str, torch.Tensor]) -> None:
        """Decode one prompt."""
        start = time.process_time()
        tokens, counts = self.decode(inputs)
        self.seconds += time.process_time() - start
        self.answers.append(tokens.tolist())
        self.counts.append(counts)

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per CPU second."""
        return sum(map(len, self.answers)) / self.seconds


class LocalClient:
    """Stands in for the HTTP client: answers in this process and keeps every prompt."""

    def __init__(self, loaded: LoadedModel, decode: Decode) -> None:
        self.loaded, self.decode = loaded, decode
        self.prompts: list[dict[str, torch.Tensor]] = []

    async def chat(self, messages: list[dict[str, Any]], **_: Any) -> Reply:
        """Answer a conversation greedily."""
        inputs = dict(self.loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True))  # fmt: skip
        self.prompts.append(inputs)
        tokens, _ = self.decode(inputs)
        return Reply(text=self.loaded.tokenizer.decode(tokens, skip_special_tokens=True), tool_calls=(),
                     finish_reason="stop", num_prompt_tokens=inputs["input_ids"].shape[1],
                     num_completion_tokens=len(tokens), latency_s=0.0, fingerprint="")  # fmt: skip

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        return self.loaded.tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]

    def end_session(self, session: str) -> None:
        """Nothing to forget."""


def load(dtype: str, asked: tuple[str, int] | None) -> tuple[LoadedModel, Decode]:
    """Load the target for one setting, and return how it decodes."""
    uses_draft = asked is not None and asked[0] == "draft_model"
    config = SpeculativeConfig(method=asked[0], num_tokens=asked[1]) if asked else None
    candidate = Candidate(
        name="speculation", checkpoint=describe_checkpoint(TARGET, root=Path()),
        serving=ServingConfig(dtype=dtype, continuous_batching=False, speculative=config))  # fmt: skip
    loaded = load_candidate(candidate, TARGET, draft_folder=DRAFT if uses_draft else None)
    generation_config = loaded.model.generation_config
    generation_config.max_new_tokens = MAX_TOKENS
    if config is not None:
        manager = SpeculativeManager(loaded, config)
        return loaded, lambda inputs: manager.generate(inputs, generation_config)
    return loaded, lambda inputs: (
        loaded.model.generate(**inputs, generation_config=generation_config)[0, inputs["input_ids"].shape[1] :], None)


def collect_prompts(num_calls: int, num_workflows: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the prompts of evenly spaced cases, every turn of a workflow one prompt."""
    client = LocalClient(*load("float32", None))
    calls, workflows = (Path("evalsets") / name for name in ("tool_calls", "workflows"))
    for module, settings, count in (
        (tool_calls, ToolCallsEval(kind="tool_calls", evalset=str(calls)), num_calls),
        (trajectories, TrajectoriesEval(kind="trajectories", evalset=str(workflows), max_turns=16), num_workflows),
    ):
        with Journal(folder / f"{settings.kind}.jsonl", fingerprint="", key="") as journal:
            asyncio.run(module.evaluate(EvalContext(
                name=settings.kind, settings=settings, evalset=_thin_out(load_evalset(Path(settings.evalset)), count),
                client=client, journal=journal, checkpoint=TARGET, folder=folder, concurrency=1,  # type: ignore[arg-type]
                max_tokens=MAX_TOKENS, context_length=1024, fingerprint="")))  # fmt: skip
    return client.prompts


def _thin_out(evalset: Evalset, count: int) -> Evalset:
    return evalset.__class__(**vars(evalset) | {"cases": evalset.cases[:: len(evalset.cases) // count][:count]})


def describe(setting: Setting, plain: Setting) -> str:
    """Return one row of the table."""
    num_other = sum(a != b for a, b in zip(setting.answers, plain.answers, strict=True))
    row = [setting.dtype, setting.name, f"{num_other} of {len(plain.answers)}"]
    total = sum_speculation(setting.counts)
    row += ["–", "–", "1"] if total is None else [
        f"{total.acceptance_rate:.3f}", f"{total.acceptance_length:.2f}", f"{total.forwards_per_token:.3f}"]
    return "| " + " | ".join([*row, f"{setting.tokens_per_s / plain.tokens_per_s:.2f}"]) + " |"


def main() -> int:
    """Decode everything in every setting and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=150)
    parser.add_argument("--workflows", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        prompts = collect_prompts(options.calls, options.workflows, Path(temporary))
    settings = [Setting(dtype, name, load(dtype, asked)[1])
                for dtype in ("float32", "bfloat16") for name, asked in METHODS]  # fmt: skip
    for inputs in prompts:
        for setting in settings:
            setting.run(inputs)
    plain = {s.dtype: s for s in settings if s.name == METHODS[0][0]}
    speed = ", ".join(f"{s.tokens_per_s:.0f} tokens/s in {dtype}" for dtype, s in plain.items())
    print(f"{len(prompts)} prompts; target only: {speed}; {time.process_time():.0f} CPU s in all\n")
    print("| dtype | setting | answers that differ | acceptance rate | accepted per target forward | "
          "target forwards per token | tokens/s against target only |")  # fmt: skip
    print("|---|---|---:|---:|---:|---:|---:|")
    for setting in settings:
        print(describe(setting, plain[setting.dtype]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
