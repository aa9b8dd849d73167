"""A server ends when its watch does: a watch that failed in silence would leave clients waiting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.products.text.serving import launcher


def watch(find_failure: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Watch a fake server until it fails; return what it ended with."""
    ended: list[str] = []
    monkeypatch.setattr(launcher, "_end", ended.append)
    server: Any = SimpleNamespace(find_failure=find_failure, loaded=SimpleNamespace(name="tiny"))
    asyncio.run(launcher._end_on_failure(server))
    return ended


def test_a_server_ends_with_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "WATCH_S", 0)
    failures = iter([None, None, "the GPU failed"])
    assert watch(lambda: next(failures), monkeypatch) == ["the GPU failed"]


def test_a_server_whose_watch_fails_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AttributeError("no such thread")

    assert watch(fail, monkeypatch) == ["tiny: looking for failures: AttributeError: no such thread"]
