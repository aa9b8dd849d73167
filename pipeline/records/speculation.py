"""Speculative decoding on disk: how tokens are drafted, and what came of the drafts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any, Self

from pydantic import model_validator

from pipeline.records.record_files import Record


class SpeculativeConfig(Record):
    """How a server drafts tokens for the target to check. Where the draft model lies is not part of what it is."""

    method: str  # "draft_model", "prompt_lookup", or what the engine calls another one
    # drafted per target forward pass, at most; the fingerprints of released bundles cover it under this name
    num_tokens: int
    options: dict[str, Any] = {}  # of the method, in the engine's own spelling
    draft_digest: str | None = None
    draft_path: str | None = None  # relative to the project root, or a model of a hub


class SpeculationCounts(Record):
    """What speculation did over one or more requests, counted where the target model runs.

    `accepted_by_position[i]` counts the target forward passes that kept at least i + 1 of their drafted tokens. A
    pass yields its accepted tokens and one more of its own, unless an accepted token ended the answer.
    """

    method: str
    num_tokens: int
    num_target_forwards: int
    num_completion_tokens: int
    num_drafted: int
    accepted_by_position: tuple[int, ...]

    @model_validator(mode="after")
    def _check_sums(self) -> Self:
        if len(self.accepted_by_position) != self.num_tokens:
            raise ValueError(f"expected {self.num_tokens} positions, got {len(self.accepted_by_position)}")
        if not self.num_accepted <= self.num_drafted <= self.num_tokens * self.num_target_forwards:
            raise ValueError(
                f"{self.num_accepted} accepted of {self.num_drafted} drafted tokens in "
                f"{self.num_target_forwards} target forwards don't add up"
            )
        return self

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the target kept."""
        return sum(self.accepted_by_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per target forward pass, on average."""
        return self.num_accepted / self.num_target_forwards if self.num_target_forwards else 0.0

    @property
    def forwards_per_token(self) -> float:
        """Target forward passes per completion token; 1 is decoding without speculation."""
        return self.num_target_forwards / self.num_completion_tokens if self.num_completion_tokens else 0.0

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        positions = zip(self.accepted_by_position, other.accepted_by_position, strict=True)
        return self.model_copy(
            update={
                "num_target_forwards": self.num_target_forwards + other.num_target_forwards,
                "num_completion_tokens": self.num_completion_tokens + other.num_completion_tokens,
                "num_drafted": self.num_drafted + other.num_drafted,
                "accepted_by_position": tuple(a + b for a, b in positions),
            }
        )


def sum_speculation(counts: Iterable[SpeculationCounts | None]) -> SpeculationCounts | None:
    """Add up the counts of requests that one server config answered; None when there are none."""
    counted = [c for c in counts if c is not None]
    return reduce(add, counted) if counted else None
