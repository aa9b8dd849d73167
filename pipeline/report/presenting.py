"""What the report and MLflow ask of a kind of product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from pipeline.gate.compare import ReleaseComparison
from pipeline.settings.base import Product

A = TypeVar("A", bound=Product, contravariant=True)
Plot = Callable[[ReleaseComparison, Path], None]


class Presenter(Protocol[A]):
    """What a kind of product shows beside what every kind does."""

    def list_plots(self, product: A) -> Mapping[str, Plot]:
        """Return the pictures beside the report, by file name, in addition to harm.png."""
