"""What an eval is given to work with. Every eval is `async def evaluate(context) -> list[CaseRecord]`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.evalsets.cards import Evalset
from pipeline.gate.harm_stop import HarmWatch
from pipeline.products.text.evals.places import Places
from pipeline.products.text.serving.client import Client
from pipeline.products.text.settings import EvalSettings
from pipeline.running.journal import Journal
from pipeline.running.shards import Shard

NUM_LONGEST = 32  # prompts of an eval whose length is looked at before the first is asked


@dataclass(frozen=True)
class EvalContext:
    """Everything one eval of one candidate needs.

    Attributes:
        name: the eval's name in params.yaml.
        settings: its settings.
        evalset: its cases, or None for a task that brings its own.
        client: the way to the endpoint.
        journal: where finished cases are kept until the whole stage has succeeded.
        checkpoint: the checkpoint's folder, for tokenizer settings.
        folder: where an eval may write files beside its records.
        places: of cases in progress, shared by the evals of an endpoint.
        max_tokens: completion tokens a request.
        context_length: tokens the endpoint takes in one forward pass.
        fingerprint: of what answers; goes into every record.
        num_turns: requests that a case may take, one after another.
        is_plain: prompts of tasks are sent as they stand, as the product's models have no chat template.
        shard: the part of the cases that is asked; None: all.
        watch: ends the eval when harm is proven, and says in which order cases are asked; None asks all as they are.
    """

    name: str
    settings: EvalSettings
    evalset: Evalset | None
    client: Client
    journal: Journal
    checkpoint: Path
    folder: Path
    places: Places
    max_tokens: int
    context_length: int
    fingerprint: str
    num_turns: int = 1
    is_plain: bool = False
    shard: Shard | None = None
    watch: HarmWatch | None = None

    def take_place(self) -> AbstractAsyncContextManager[None]:
        """Wait for a place, and hold it during a case: watched evals and cases of more turns come first."""
        return self.places.take((self.watch is None, -self.num_turns))

    def list_own(self) -> Sequence[Any]:
        """Return the evalset's cases that are asked, in its order."""
        assert self.evalset is not None
        return [case for case in self.evalset.cases if self.shard is None or self.shard.holds(case.cluster)]
