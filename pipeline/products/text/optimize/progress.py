"""The log of a quantisation step: lines while it runs, and losses, fallbacks and seconds for the candidate's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.records.evaluations import Fallback
from pipeline.running.phases import Phases


class StepLog:
    """Losses, fallbacks and seconds of one step; each loss is one short line on stdout.

    `total` is the number of losses to come, for the count at the end of the line.
    """

    def __init__(self, kind: str, *, total: int = 0) -> None:
        self.kind = kind
        self.total = total
        self.losses: dict[str, float] = {}
        self.fallbacks: list[Fallback] = []
        self.ranges: dict[str, Any] = {}  # the largest of inputs ("LAYER.input") and caches ("LAYER.k", "LAYER.v")
        self._num_reported = 0
        self.phases = Phases()
        self._columns: dict[str, list[Any]] = {}  # factors of a layer's input channels
        self._rows: dict[str, list[Any]] = {}  # divisors of the last of a layer's output channels

    def record_loss(self, layers: Sequence[str], loss: float) -> None:
        """Note the calibration loss that these layers share, and print it."""
        self.losses |= dict.fromkeys(layers, loss)
        self._num_reported += 1
        shown = layers[0] + "".join(f"+{name.rpartition('.')[2]}" for name in layers[1:])
        print(f"{self.kind} {shown} loss {loss:.2e} [{self._num_reported}/{self.total}]", flush=True)

    def record_fallback(self, layer: str, reason: str) -> None:
        """Note that the library did something else than was asked, and print it."""
        self.fallbacks.append(Fallback(layer=layer, reason=reason))
        print(f"{self.kind} {layer} fallback: {reason}", flush=True)

    def record_scales(self, layers: Sequence[str], scales: Any, *, smoothed: str) -> None:
        """Note the factors by which the input channels of layers grew and the outputs of the one before shrank."""
        factors = scales.float().cpu()
        for layer in layers:
            self._columns.setdefault(layer, []).append(factors)
        self._rows.setdefault(smoothed, []).append(factors)

    def record_range(self, name: str, largest: Any) -> None:
        """Note the largest absolute value of an input or a cache, (1,) or (heads,), if none before was larger."""
        known = self.ranges.get(name)
        self.ranges[name] = largest if known is None else known.maximum(largest)

    def export(self) -> dict[str, Any]:
        """Return what was noted, for the log of another process; tensors are on the CPU."""
        import torch

        ranges = {name: torch.as_tensor(largest).cpu() for name, largest in self.ranges.items()}
        fallbacks = [(fallback.layer, fallback.reason) for fallback in self.fallbacks]
        scales = {"columns": self._columns, "rows": self._rows}
        return {"losses": self.losses, "fallbacks": fallbacks, "ranges": ranges, **scales}

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add what another process noted of its share of layers and samples; what both noted counts once."""
        for layer, loss in other["losses"].items():
            if layer not in self.losses:
                self.record_loss([layer], loss)
        known = {(fallback.layer, fallback.reason) for fallback in self.fallbacks}
        for layer, reason in other["fallbacks"]:
            if (layer, reason) not in known:
                self.record_fallback(layer, reason)
        for name, largest in other["ranges"].items():
            self.record_range(name, largest)
        # scales are found from what all ranks saw, and are the same everywhere
        self._columns = self._columns or other["columns"]
        self._rows = self._rows or other["rows"]

    def is_moved(self, layer: str) -> bool:
        """Whether scales were moved into or out of a layer, or a norm."""
        return layer in self._columns or layer in self._rows

    def scale_as_moved(self, layer: str, weight: Any) -> Any:
        """Return a weight, (out, in), or a norm or bias, (out,), with the scales that were moved; itself if none."""
        import torch

        columns, rows = self._columns.get(layer, []), self._rows.get(layer, [])
        moved = weight.to(torch.float32, copy=True) if columns or rows else weight
        for scales in columns if weight.ndim > 1 else ():
            moved *= scales.to(weight.device).view(1, -1)
        for scales in rows:
            moved[-len(scales) :] /= scales.to(weight.device).view(-1, *[1] * (weight.ndim - 1))
        return moved
