"""Markdown that the parts of the report share: a table, and a text as it is."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.gate.wording import show_unprintable


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the second row says how columns are aligned."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def render_block(text: str) -> list[str]:
    """Return the lines of a block that shows a text as it is, whatever fences it holds."""
    text = show_unprintable(text, keep="\n\t")
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence]
