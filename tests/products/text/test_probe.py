"""What a server proves at its start: the same prompt, computed alike, gives the same answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.errors import EngineError
from pipeline.products.text.serving import app
from pipeline.products.text.serving.exactness import is_exact
from pipeline.products.text.serving.loading import LoadedModel

FIRST, CACHED, OTHER = [1, 2], [1, 3], [1, 4]


def probe(
    monkeypatch: pytest.MonkeyPatch,
    answers: list[list[int]],
    *,
    dtype: str,
    device: str = "cpu",
    is_imitated: bool = False,
) -> None:
    monkeypatch.setattr(app, "check_template", lambda _: None)
    server = app.Server.__new__(app.Server)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=100))
    serving = SimpleNamespace(dtype=dtype, context_length=64, concurrency=2)
    model: Any = SimpleNamespace(config=config, device=torch.device(device))
    hardware = {"device": "cpu x86_64" if device == "cpu" else "NVIDIA H200"}
    facts = {"engine": {"imitated": {"int8 inputs": 2}} if is_imitated else {}, "hardware": hardware}
    sides: dict[str, Any] = {"model": model, "scorer": model, "serving": serving, "batching": None}
    loaded = LoadedModel("m", tokenizer=None, facts=facts, config={}, **sides)
    monkeypatch.setattr(server, "loaded", loaded, raising=False)
    monkeypatch.setattr(server, "_manager", None, raising=False)
    left = iter(answers)

    async def generate(prompt: list[int], request_id: str) -> list[int]:
        return next(left)

    monkeypatch.setattr(server, "_generate", generate)
    asyncio.run(server.probe())


def test_half_precision_may_change_with_a_cached_prompt_but_not_between_two_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe(monkeypatch, [FIRST, CACHED, CACHED], dtype="bfloat16")
    with pytest.raises(EngineError, match=r"gave \[1, 3\], then \[1, 4\]; the server is not greedy"):
        probe(monkeypatch, [FIRST, CACHED, OTHER], dtype="bfloat16")


def test_float32_gives_one_answer_whatever_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"gave \[1, 2\], then \[1, 3\]; the server is not greedy"):
        probe(monkeypatch, [FIRST, CACHED, CACHED], dtype="float32")


@pytest.mark.parametrize(("device", "is_imitated"), [("cpu", True), ("cuda", False)])
def test_float32_is_exact_unless_a_gpu_imitates_inputs(
    monkeypatch: pytest.MonkeyPatch, device: str, is_imitated: bool
) -> None:
    """A last bit turns a step of an input there: the server of W8A8 was refused as one that samples."""
    probe(monkeypatch, [FIRST, CACHED, CACHED], dtype="float32", device="cuda", is_imitated=True)
    with pytest.raises(EngineError, match="the server is not greedy"):
        probe(monkeypatch, [FIRST, CACHED, OTHER], dtype="float32", device="cuda", is_imitated=True)
    with pytest.raises(EngineError, match="the server is not greedy"):
        probe(monkeypatch, [FIRST, CACHED, CACHED], dtype="float32", device=device, is_imitated=is_imitated)


@pytest.mark.parametrize(
    ("dtype", "device", "engine", "expected"),
    [
        ("float32", "NVIDIA H200", {"imitated": {"fp8 inputs": 2}}, False),
        ("float32", "NVIDIA H200", {}, True),
        ("float32", "cpu x86_64", {"imitated": {"fp8 inputs": 2}}, True),
        ("bfloat16", "cpu x86_64", {}, False),
    ],
)
def test_the_benchmark_and_the_server_agree_on_what_is_exact(
    dtype: str, device: str, engine: dict[str, Any], expected: bool
) -> None:
    """The benchmark refused candidates for a near tie that the server itself expects on a GPU."""
    assert is_exact(dtype, {"engine": engine, "hardware": {"device": device}}) == expected
