"""The Markdown of sections, which the report and the summary in CI share."""

from __future__ import annotations

from pipeline.gate.wording import escape_markdown, show_unprintable
from pipeline.report.sections import Block, Figure, Folded, Quote, Section, Table


def write_section(section: Section) -> str:
    """Return a section, without a line's end behind it."""
    return "\n\n".join([f"### {section.title}", *map(write_block, section.blocks)])


def write_block(block: Block) -> str:
    """Return a block, without a line's end behind it."""
    match block:
        case Table(rows):
            return "\n".join(f"| {' | '.join(row)} |" for row in rows)
        case Quote(text):
            return "\n".join(render_block(text))
        case Figure():
            return f"![{block.description}]({block.name})"
        case Folded(title, blocks):
            inner = "\n\n".join(map(write_block, blocks))
            return f"<details><summary>{title}</summary>\n\n{inner}\n\n</details>"
        case _:
            return block


def is_embedded(name: str, report: str) -> bool:
    """Say whether a report shows a picture."""
    return f"]({name})" in report


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
