"""Where stages do their work: on this machine, or on a Ray cluster. It changes no result, and nothing depends on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.settings.base import Settings

MAX_LOCAL = 64  # processes of a product on one machine
NumWorkers = Literal["auto"] | Annotated[int, Field(ge=1, le=4096)]


class LocalExecution(Settings):
    """Processes of this machine."""

    kind: Literal["local"] = "local"
    num_workers: NumWorkers = "auto"  # of a product without num_workers or num_servers; auto: GPUs, or cores

    def count_local_workers(self) -> int:
        """Return how many processes a product uses that does not say so itself."""
        return count_local() if self.num_workers == "auto" else min(self.num_workers, MAX_LOCAL)


class RayExecution(Settings):
    """Replicas on a Ray cluster."""

    kind: Literal["ray"]
    address: str = "auto"  # as `ray.init` takes it
    num_workers: NumWorkers = "auto"  # replicas; auto: as many as there are resources for
    resources: dict[str, Annotated[float, Field(gt=0)]] = {"CPU": 1}  # of a replica

    def count_local_workers(self) -> int:
        """Return how many processes a product uses where a stage works on this machine, as the benchmark does."""
        return count_local()

    def count_workers(self, available: Mapping[str, float]) -> int:
        """Return how many replicas to start, in a cluster that has so much of each resource in all."""
        if self.num_workers != "auto":
            return self.num_workers
        return max(1, int(min(available.get(name, 0) / amount for name, amount in self.resources.items())))


def count_local() -> int:
    """Count the GPUs that this process may use, or its cores where there is none."""
    from pipeline.running.environment import VISIBLE, count_cores, list_visible_gpus

    num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return min(MAX_LOCAL, len(list_visible_gpus(num_gpus, os.environ.get(VISIBLE))) or count_cores())


Execution = Annotated[LocalExecution | RayExecution, Field(discriminator="kind")]
