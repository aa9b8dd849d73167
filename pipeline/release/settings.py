"""Read the settings that a bundle keeps; those of before products had names are read as a product of today.

Then text was the whole of params.yaml, and `images`, `detector` and `upscaler` were sections of it with their own
candidates; `serving` was called sampling or running, and held what is `resources` now.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.products.params import get_product, parse_params, read_settings
from pipeline.settings.base import Product

_SECTIONS = {"images": "images", "detector": "vision", "upscaler": "vision"}  # of old, and the kind of each
_RESOURCES = ("num_servers", "num_workers", "request_timeout_s", "start_timeout_s")


def load_released(path: Path, name: str) -> Product:
    """Return a product from the settings beside its release.

    Args:
        path: of the settings file.
        name: of the product.

    Raises:
        SettingsError: they can't be read, or have no such product.
    """
    data = read_settings(path)
    if isinstance(data, Mapping) and "products" not in data:
        data = _upgrade(data, name)
    return get_product(parse_params(data, where=str(path)), name, kind=Product)


def _upgrade(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return settings of old with one product alone, in the form of today."""
    section = data.get(name, {}) if name in _SECTIONS else {k: v for k, v in data.items() if k not in _SECTIONS}
    candidates = section.get("candidates", {})
    running = next((dict(section[key]) for key in ("serving", "sampling", "running") if key in section), {})
    product = {key: value for key, value in section.items() if key not in ("candidates", "sampling", "running")}
    product |= {
        "kind": _SECTIONS.get(name, "text"),
        "serving": {key: value for key, value in running.items() if key not in _RESOURCES},
        "resources": {key: value for key, value in running.items() if key in _RESOURCES},
    }
    return {"products": {name: product}, "candidates": {own: {"product": name, **c} for own, c in candidates.items()}}
