"""Where stages do their work: on this machine, or on a Ray cluster. It changes no result, and nothing depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from pipeline.settings.base import Settings

MAX_WORKERS = 64  # processes of a product on one machine
NumWorkers = Literal["auto"] | Annotated[int, Field(ge=1, le=4096)]


class LocalExecution(Settings):
    """Processes of this machine."""

    kind: Literal["local"] = "local"
    # of a product without num_workers or num_servers; auto: GPUs, or cores
    num_workers: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_WORKERS)] = "auto"


class RayExecution(Settings):
    """Replicas on a Ray cluster."""

    kind: Literal["ray"]
    address: str = "auto"  # as `ray.init` takes it
    num_workers: NumWorkers = "auto"  # replicas; auto: as many as there are resources for
    resources: dict[str, Annotated[float, Field(gt=0)]] = {"CPU": 1}  # of a replica

    def count_workers(self, available: Mapping[str, float]) -> int:
        """Return how many replicas to start, in a cluster that has so much of each resource in all."""
        if self.num_workers != "auto":
            return self.num_workers
        return max(1, int(min(available.get(name, 0) / amount for name, amount in self.resources.items())))


Execution = Annotated[LocalExecution | RayExecution, Field(discriminator="kind")]
