"""What a quantisation step says while it runs, and what it remembers for the candidate."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.records import Fallback


class StepLog:
    """Losses and fallbacks of one step; each loss is one short line on stdout.

    `total` is the number of losses to come, for the count at the end of the line.
    """

    def __init__(self, kind: str, *, total: int) -> None:
        self.kind = kind
        self.total = total
        self.losses: dict[str, float] = {}
        self.fallbacks: list[Fallback] = []
        self._num_reported = 0

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
