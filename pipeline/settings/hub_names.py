"""How params.yaml names a checkpoint: a folder of the project, or a commit of a model on a Hugging Face hub.

`hf://ORG/NAME@REVISION` names a model of the hub, with the 40 hex digits of a commit behind the @.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SCHEME = "hf://"
_NAME = r"\w(?:[\w.-]*\w)?"  # as the hub has it, which takes no two dashes or dots in a row
_PINNED = re.compile(rf"hf://(?!\S*(?:--|\.\.))({_NAME}/{_NAME})@([0-9a-f]{{40}})", re.ASCII)


class PinnedModel(NamedTuple):
    """One commit of a model on a hub."""

    repository: str  # "ORG/NAME"
    revision: str  # of the commit, 40 hex digits


def parse_pinned(reference: str) -> PinnedModel | None:
    """Return the model of a hub that a reference names; None: it names a folder, or nothing at all."""
    match = _PINNED.fullmatch(reference)
    return PinnedModel(*match.groups()) if match else None


def find_unpinned(reference: str) -> str | None:
    """Say what is wrong with a reference to a hub; None: nothing is, or it names a folder."""
    if not reference.startswith(SCHEME) or parse_pinned(reference):
        return None
    return (
        f"expected {SCHEME}ORG/NAME@REVISION with the 40 hex digits of a commit, got {reference!r}: a branch or tag "
        "can move, so nobody could say which weights were judged; copy the commit from the model's page"
    )
