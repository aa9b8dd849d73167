"""The prompts of `benchmarks.speculation`, three kinds of them, and how one setting decodes a prompt.

Tool calls and every turn of workflows, as the target itself plays them in float32; and prose, where the model
is unsure of names and numbers: the first 32 tokens of each shipped document, BOS included, no chat template.

Not a script: `python -m benchmarks.speculation`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.evals import tool_calls, trajectories
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.places import Places
from pipeline.products.text.serving.client import Reply
from pipeline.products.text.serving.loading import LoadedModel, load_candidate
from pipeline.products.text.serving.speculation import SpeculativeManager
from pipeline.products.text.settings import ToolCallsEval, TrajectoriesEval
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig
from pipeline.running.journal import Journal

TARGET, DRAFT = Path("models/agent"), Path("models/agent-draft")
MAX_TOKENS = 64
PROSE_TOKENS = 32  # of a document that are given; the shortest has five times as many
Inputs = dict[str, torch.Tensor]
Decode = Callable[[Inputs], tuple[torch.Tensor, SpeculationCounts | None]]


class LocalClient:
    """Stands in for the HTTP client: answers in this process and keeps every prompt."""

    def __init__(self, loaded: LoadedModel, decode: Decode) -> None:
        self.loaded, self.decode = loaded, decode
        self.prompts: list[Inputs] = []

    async def chat(self, messages: list[dict[str, Any]], **_: Any) -> Reply:
        """Answer a conversation greedily."""
        inputs = dict(
            self.loaded.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        )
        self.prompts.append(inputs)
        tokens, _ = self.decode(inputs)
        return Reply(
            text=self.loaded.tokenizer.decode(tokens, skip_special_tokens=True),
            tool_calls=(),
            finish_reason="stop",
            num_prompt_tokens=inputs["input_ids"].shape[1],
            num_completion_tokens=len(tokens),
            latency_s=0.0,
            fingerprint="",
        )

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
        name="speculation",
        checkpoint=read_checkpoint(TARGET, root=Path()),
        serving=ServingConfig(dtype=dtype, continuous_batching=False, speculative=config),
    )
    loaded = load_candidate(candidate, TARGET, draft_folder=DRAFT if uses_draft else None)
    generation_config = loaded.model.generation_config
    generation_config.max_new_tokens = MAX_TOKENS
    if config is not None:
        manager = SpeculativeManager(loaded, config)
        return loaded, lambda inputs: manager.generate(inputs, generation_config)
    return loaded, lambda inputs: (
        loaded.model.generate(**inputs, generation_config=generation_config)[0, inputs["input_ids"].shape[1] :],
        None,
    )


def collect_prompts(num_calls: int, num_workflows: int, num_documents: int) -> dict[str, list[Inputs]]:
    """Return the prompts of evenly spaced cases by kind, every turn of a workflow one prompt."""
    loaded, decode = load("float32", None)
    names = ("tool_calls", "workflows", "prose")
    calls, workflows, prose = (
        _thin_out(load_evalset(Path("evalsets") / name), count)
        for name, count in zip(names, (num_calls, num_workflows, num_documents), strict=True)
    )
    play_calls, play_workflows = LocalClient(loaded, decode), LocalClient(loaded, decode)
    for client, evaluate, evalset, settings in (
        (play_calls, tool_calls.evaluate, calls, ToolCallsEval(kind="tool_calls", evalset="")),
        (
            play_workflows,
            trajectories.evaluate,
            workflows,
            TrajectoriesEval(kind="trajectories", evalset="", max_turns=16),
        ),
    ):
        with (
            tempfile.TemporaryDirectory() as folder,
            Journal(Path(folder) / "journal.jsonl", fingerprint="", key="") as journal,
        ):
            asyncio.run(
                evaluate(
                    EvalContext(
                        name=settings.kind,
                        settings=settings,
                        evalset=evalset,
                        client=client,
                        journal=journal,  # type: ignore[arg-type]
                        checkpoint=TARGET,
                        folder=Path(folder),
                        places=Places(1),
                        max_tokens=MAX_TOKENS,
                        context_length=1024,
                        fingerprint="",
                    )
                )
            )
    return {
        "tool calls": play_calls.prompts,
        "workflows": play_workflows.prompts,
        "prose": [_cut_document(loaded.tokenizer, case.text) for case in prose.cases],
    }


def _thin_out(evalset: Evalset, count: int) -> Evalset:
    return evalset.__class__(**vars(evalset) | {"cases": evalset.cases[:: len(evalset.cases) // count][:count]})


def _cut_document(tokenizer: Any, text: str) -> Inputs:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = torch.tensor([[tokenizer.bos_token_id, *ids][:PROSE_TOKENS]])
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
