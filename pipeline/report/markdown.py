"""Markdown that the report and the summary in CI share: a table, a text as it is, a case whose judgement changed."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.gate.wording import describe_place, escape_markdown, show_unprintable
from pipeline.report.explanation_records import ExplainedFlip


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the second row says how columns are aligned."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def render_name(name: str) -> str:
    """Return a name in code style; one that would break out of its code span, or of a table's row, is escaped."""
    if name == show_unprintable(name) and not {"`", "|"} & set(name):
        return f"`{name}`"
    return f"<code>{escape_markdown(name)}</code>"


def render_block(text: str) -> list[str]:
    """Return the lines of a block that shows a text as it is, whatever fences it holds."""
    text = show_unprintable(text, keep="\n\t")
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence]


def show_flip(flip: ExplainedFlip) -> list[str]:
    """Return the lines of a case that can be unfolded: what was asked, and what both sides answered."""
    buckets = f" [{', '.join(flip.buckets)}]" if flip.buckets else ""
    case = escape_markdown(f"{flip.eval_name} / {flip.case_id}{buckets}: {describe_place(flip)}")
    lines = [
        f"<details><summary><b>{flip.kind}</b> {case}</summary>",
        "",
        "Prompt:",
        "",
        *render_block(flip.prompt.text),
        "",
    ]
    for side, passage in ((flip.against, flip.reference), ("candidate", flip.candidate)):
        if passage is not None:
            lines += [f"{side[0].upper()}{side[1:]}:", "", *render_block(passage.text), ""]
    return [*lines, "</details>", ""]
