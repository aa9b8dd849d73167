"""The small project of the fault table: a tiny checkpoint, three evals, and a real server for them.

The weights are random, so the answers are noise: no call is right, no workflow does anything, which is
what the workflows ask for, and the likelihoods are those of a model that knows nothing. That is enough
for a release that passes when nothing goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evalsets.seal import seal
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.settings import ResourceSettings
from pipeline.records.evaluations import BuiltCandidate, Candidate
from pipeline.records.record_files import write_record
from pipeline.records.serving import ServingConfig
from tests.fakes.synthetic_records import NO_BENCHMARK, PRODUCT
from tests.fakes.tiny_llama import CHAT_TEMPLATE, write_documents, write_tiny_llama

BUILD = Path("build", PRODUCT)
MODEL = "tiny"  # the name that the server answers to
SERVING: dict[str, Any] = {
    "dtype": "float32",
    "continuous_batching": True,
    "concurrency": 8,
    "num_threads": 1,
    "context_length": 512,
    "max_tokens": 4,
}
RESOURCES: dict[str, Any] = {"num_servers": 1, "request_timeout_s": 60.0, "start_timeout_s": 180.0}
EVALS = {
    "calls": {"kind": "tool_calls", "evalset": "evalsets/calls", "send_tools": True},
    "flows": {"kind": "trajectories", "evalset": "evalsets/flows", "max_turns": 2, "send_tools": True},
    "prose": {"kind": "perplexity", "evalset": "evalsets/prose", "top_logprobs": 4},
}
# 32 documents of a model that knows nothing prove little
GATE = {
    "alpha": 0.05,
    "on_inconclusive": "block",
    "tolerances": {"flows/task_completion_rate": {"overall": 0.12}, "prose/bits_per_byte": {"overall": 2.0}},
}
CALLS = [f"Task {i}: order {i + 2} reams." for i in range(16)]
FLOWS = [f"Task {i}: the stock of paper is {i + 20} reams, so do nothing." for i in range(100, 132)]
PROSE = [
    f"Parcel {i} was taken to the {gate} gate {n * i} minutes before noon."
    for i in range(8)
    for n, gate in enumerate(("north", "south", "east", "west"), start=2)
]
NUM_CASES = len(CALLS) + len(FLOWS) + len(PROSE)
TOOLS = {
    "order": {
        "description": "Order reams.",
        "effects": [{"do": "set", "path": "ordered", "value": True}],
        "parameters": {"type": "object", "properties": {"reams": {"type": "integer"}}},
    }
}
WITH_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}" + CHAT_TEMPLATE


def write_models(folder: Path) -> None:
    """Write a checkpoint, and another one of the same kind, which show tools to the model."""
    for name, seed in ("tiny", 0), ("other", 1):
        write_tiny_llama(folder / name, seed=seed)
        (folder / name / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")


def write_evalsets(folder: Path) -> None:
    """Write the cases of all three evals."""
    _write_chats(
        folder / "calls",
        CALLS,
        [{"expected": {"name": "order", "arguments": {"reams": i + 2}}} for i in range(len(CALLS))],
    )
    untouched = {"state": {"ordered": False}, "checks": [{"path": "ordered", "equals": False}]}
    _write_chats(folder / "flows", FLOWS, [untouched] * len(FLOWS))
    write_documents(folder / "prose", {"prose": PROSE})


def _write_chats(folder: Path, questions: list[str], rest: list[dict[str, Any]]) -> None:
    name = folder.name
    cases = [
        {"id": f"{name}-{i}", "cluster": f"{name}-{i}", "messages": [{"role": "user", "content": text}], **more}
        for i, (text, more) in enumerate(zip(questions, rest, strict=True))
    ]
    card = {
        "name": name,
        "version": "1",
        "licence": "CC0-1.0",
        "kind": EVALS[name]["kind"],
        "cluster": "a task",
        "description": "for tests",
        "made_by": "tests",
        "tools": TOOLS,
    }
    folder.mkdir(parents=True)
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    (folder / "card.yaml").write_text(json.dumps(card))  # JSON is YAML
    seal(folder)


def served_at(url: str) -> dict[str, Any]:
    """Return what a candidate's settings say about the server that it is attached to."""
    return {"engine": {"kind": "openai", "base_url": url, "model": MODEL}}


def write_project(folder: Path, url: str, there: dict[str, Any], **resources: Any) -> None:
    """Write settings and records of a reference that is served at `url`, and of the candidate `there`."""
    candidates = {"reference": {"checkpoint": "models/tiny", "steps": []} | served_at(url), "there": there}
    product = {
        "kind": "text",
        "reference": "reference",
        "release": ["there"],
        "serving": SERVING,
        "resources": RESOURCES | resources,
        "optimize": {"calibration_texts": "evalsets/prose", "num_threads": 1},
        "evals": EVALS,
        "gate": GATE,
        "canary": {"num_prompts": 8, "target_rate": 0.49},
        "benchmark": NO_BENCHMARK,
    }
    (folder / "params.yaml").write_text(
        json.dumps(
            {  # JSON is YAML
                "products": {PRODUCT: product},
                "candidates": {name: {"product": PRODUCT} | settings for name, settings in candidates.items()},
            }
        )
    )
    for name, settings in candidates.items():
        checkpoint = read_checkpoint(folder / settings["checkpoint"], root=folder)
        write_record(
            folder / BUILD / "candidates" / name / "candidate.json", BuiltCandidate(name=name, checkpoint=checkpoint)
        )


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve `models/tiny` of a project by the embedded engine; yield where."""
    checkpoint = read_checkpoint(folder / "models/tiny", root=folder)
    candidate = Candidate(name=MODEL, checkpoint=checkpoint, serving=ServingConfig(**SERVING))
    with serve_candidate(candidate, ResourceSettings(**RESOURCES), root=folder) as url:
        yield url


@contextlib.contextmanager
def serve_candidate(candidate: Candidate, resources: ResourceSettings, *, root: Path) -> Iterator[str]:
    """Serve a candidate of a project by one server; yield where."""
    engine = start_engine(candidate, resources, evals={}, root=root, logs=root / "logs")
    with asyncio.Runner() as runner:
        running, _ = runner.run(engine.__aenter__())
        try:
            yield running.base_urls[0]
        finally:
            runner.run(engine.__aexit__(None, None, None))
