"""Other people's texts where they are shown: what would steer a terminal or a CI log is written out.

Names of cases and buckets, failures and outputs of models stand in what a CI system reads line by line, and some lines
are commands to it: GitHub's runner acts on "::" at the start of a line and on "##[" anywhere in it, Azure Pipelines on
"##vso[", TeamCity on "##teamcity[". One character of each is written as its escape, as are those that don't print.
Every text that leaves quantgate for people goes through here; records keep it as it is.
"""

from __future__ import annotations

import re
import unicodedata

_MAX_LINE = 4_000  # characters
_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#[\w.]*(?: [^\[\]\n]*)?\[)", re.MULTILINE)


def show_unprintable(text: str, *, keep: str = "") -> str:
    r"""Write characters that do not print (control, bidi, line ends) and commands as their escape, ESC as "\x1b"."""
    if not text.isprintable():
        text = "".join(
            ch
            if ch.isprintable() or ch in keep or unicodedata.category(ch) == "Zs"
            else ch.encode("unicode_escape").decode()
            for ch in text
        )
    return _COMMAND.sub(_write_out, text) if "::" in text or "##" in text else text


def _write_out(match: re.Match[str]) -> str:
    return r"\x23" if match[0] == "#" else rf"{match[1]}\x3a"


def format_line(text: str) -> str:
    """Write a text as one line that has an end and commands nothing."""
    line = show_unprintable(text)
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} … ({len(line) - _MAX_LINE:,} more characters)"
