"""What a server proves at its start: the same prompt, computed alike, gives the same answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pipeline.errors import EngineError
from pipeline.products.text.serving import app

FIRST, CACHED, OTHER = [1, 2], [1, 3], [1, 4]


def probe(monkeypatch: pytest.MonkeyPatch, answers: list[list[int]], *, dtype: str) -> None:
    monkeypatch.setattr(app, "check_template", lambda _: None)
    server = app.Server.__new__(app.Server)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=100))
    serving = SimpleNamespace(dtype=dtype, context_length=64, concurrency=2)
    model = SimpleNamespace(config=config)
    loaded = SimpleNamespace(name="m", tokenizer=None, model=model, serving=serving)
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
