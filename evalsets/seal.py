"""Seal an evalset: count its cases and write the counts and their digest into its card.

    python -m evalsets.seal evalsets/mine

A card without a seal, or with one that no longer fits `cases.jsonl`, loads nowhere. Run this when the
cases were meant to change. All other keys of the card stay, with their order and comments; indentation
becomes ruamel.yaml's.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from pipeline.errors import EvalsetError
from pipeline.evalsets import (
    CARD_FILE,
    CASES_FILE,
    Card,
    CardText,
    Seal,
    compute_seal,
    load_cases,
    parse_card,
    read_card,
)
from pipeline.files import write_text
from stages.cli import run_stage

_LINE_WIDTH = 120


def seal(folder: Path) -> Card:
    """Write what `cases.jsonl` holds into the card of its folder, and return the card.

    Raises:
        EvalsetError: a card or case that is malformed, with file and line; the card stays as it was.
    """
    text = read_card(folder)
    cases = load_cases(folder, parse_card(text, folder, CardText))
    card = _make_yaml().load(text)
    _set_seal(card, compute_seal(folder / CASES_FILE, cases))
    sealed = render_card(card)
    checked = parse_card(sealed, folder, Card)
    write_text(folder / CARD_FILE, sealed)
    return checked


def render_card(card: dict[str, Any]) -> str:
    """Return a card as YAML."""
    buffer = io.StringIO()
    _make_yaml().dump(card, buffer)
    return buffer.getvalue()


def describe(card: Card) -> str:
    """Say in one line what was sealed."""
    buckets = ", ".join(f"{name} {num:,}" for name, num in card.buckets.items())
    return (f"{card.name}: {card.num_cases:,} cases, {card.num_clusters:,} clusters, "
            f"{f'buckets {buckets}' if buckets else 'no buckets'}; card sealed")  # fmt: skip


def _make_yaml() -> YAML:
    yaml = YAML()
    yaml.width = _LINE_WIDTH
    yaml.preserve_quotes = True
    return yaml


def _set_seal(card: CommentedMap, found: Seal) -> None:
    """Set the keys of a seal; those that a card does not have yet go to its end."""
    holder, key = _find_comment(card)
    comment = holder.ca.items.pop(key, None)
    old = card.get("buckets")
    card.update(found.model_dump() | {"buckets": CommentedMap(found.buckets)})
    if isinstance(old, CommentedMap):
        card["buckets"].ca.items.update({k: c for k, c in old.ca.items.items() if k in found.buckets})
    if comment is not None:
        holder, key = _find_comment(card)
        holder.ca.items[key] = comment


def _find_comment(card: CommentedMap) -> tuple[CommentedMap, str]:
    """Return where ruamel.yaml hangs the comment between the buckets and the next key: on the last bucket."""
    buckets = card.get("buckets")
    if isinstance(buckets, CommentedMap) and buckets and not buckets.fa.flow_style():
        return buckets, list(buckets)[-1]
    return card, "buckets"


def main(argv: list[str]) -> int:
    """Seal the folder named on the command line and say what it holds."""
    if len(argv) != 1:
        raise EvalsetError(f"expected one evalset folder, got {argv!r}; usage: python -m evalsets.seal FOLDER")
    try:
        print(describe(seal(Path(argv[0]))))
    except OSError as error:
        raise EvalsetError(str(error)) from None
    return 0


if __name__ == "__main__":
    run_stage("seal", main)
