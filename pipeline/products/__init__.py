"""The kinds of products: the only list of them."""

from __future__ import annotations

from typing import Any

from pipeline.product import Kind
from pipeline.products.images import ImagesKind
from pipeline.products.text import TextKind
from pipeline.products.vision import VisionKind
from pipeline.settings.base import Eval
from pipeline.settings.metrics import MetricDefinition

KINDS: dict[str, Kind[Any]] = {"text": TextKind(), "images": ImagesKind(), "vision": VisionKind()}


def find_eval_kind(kind: str) -> type[Eval] | None:
    """Return the settings of a kind of eval; None where no kind of product has it, as in records of others."""
    return next((kinds[kind] for product in KINDS.values() if kind in (kinds := product.evals)), None)


def list_known_metrics() -> dict[str, MetricDefinition]:
    """Return the metrics that all kinds declare, by name alone."""
    return {m.name: m for kind in KINDS.values() for settings in kind.evals.values() for m in settings.metrics}
