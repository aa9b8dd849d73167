"""The short digest that a release keeps of an output, by which other records name it, whole or kept."""

from __future__ import annotations

from pipeline.records.digests import digest_text

KEPT_DIGITS = 12  # enough to tell two lines of one case apart


def shorten_line(line: str) -> str:
    """Return what a release keeps of a line of an output."""
    return digest_text(line)[:KEPT_DIGITS]


def name_picture(output: str) -> str:
    """Return the short digest of a picture.

    Args:
        output: of its record: the sha256 of its pixels, or what a release keeps of that.
    """
    return output if len(output) == KEPT_DIGITS else shorten_line(output)
