"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.gate.wording import use_metrics
from pipeline.products import list_known_metrics
from pipeline.running.made_files import make_missing
from tests.paths import ROOT


def pytest_sessionstart() -> None:
    """Make the weights and pictures that git does not hold, as test files read some while they are imported."""
    make_missing(ROOT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with whole runs: they take longest, and no worker should be left with one at the end."""
    items.sort(key=lambda item: "integration" not in item.path.parts)


@pytest.fixture(scope="session", autouse=True)
def metrics_in_use() -> Iterator[None]:
    """Let names stand for the metrics of all kinds: what a stage does for those of its product."""
    with use_metrics(list_known_metrics()):
        yield
