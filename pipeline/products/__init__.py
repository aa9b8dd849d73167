"""The kinds of products: the only list of them."""

from __future__ import annotations

from typing import Any

from pipeline.product import Kind
from pipeline.products.images import ImagesKind
from pipeline.products.text import TextKind
from pipeline.products.vision import VisionKind

KINDS: dict[str, Kind[Any]] = {"text": TextKind(), "images": ImagesKind(), "vision": VisionKind()}
