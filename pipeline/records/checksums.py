"""SHA256SUMS of a folder: which file was changed, removed or added since it was written.

The file is that of coreutils, so `sha256sum -c SHA256SUMS` checks it where there is no Python. It finds accidents and
careless edits: whoever changes a file can write it anew, and only a signature finds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.records.digests import digest_file
from pipeline.records.files import read_bounded, write_text
from pipeline.records.plain_text import show_unprintable

SUMS = "SHA256SUMS"


def write_sums(folder: Path) -> None:
    """Write the digest of every file of a folder, but for the sums themselves, into it."""
    write_text(folder / SUMS, _render(_digest(folder)))


def read_sums(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each line; of another line, such as the empty last one, no name."""
    for line in text.split("\n"):
        digest, _, name = line.partition("  ")
        yield name, digest


def find_links(folder: Path) -> list[str]:
    """Return what is a link, one line each, in the order of names: what it leads to may be another thing tomorrow."""
    return [
        f"{show_unprintable(str(path))}: a link; a bundle holds its files itself"
        for path in sorted(folder.rglob("*"))
        if path.is_symlink()
    ]


def find_changes(folder: Path) -> list[str]:
    """Return what is not as it was when the sums were written, one line each, in the order of names."""
    try:
        text = read_bounded(folder / SUMS).decode()
    except (OSError, UnicodeDecodeError, EvidenceError):
        return [f"{folder / SUMS}: expected the digests of all files, found no text file of that name"]
    found = _digest(folder)
    if text == _render(found):
        return []
    listed = dict(read_sums(text))
    problems = [
        _describe(folder / name, listed.get(name), found.get(name))
        for name in sorted(listed | found)
        if name and listed.get(name) != found.get(name)
    ]
    return problems or [f"{folder / SUMS}: expected a line `DIGEST  NAME` for each file, sorted, found other text"]


def _digest(folder: Path) -> dict[str, str]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: digest_file(path) for name, path in files.items() if name != SUMS}


def _render(digests: dict[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def _describe(path: Path, listed: str | None, found: str | None) -> str:
    name = show_unprintable(str(path))
    if found is None:
        return f"{name}: listed in {SUMS}, found no file"
    if listed is None:
        return f"{name}: not listed in {SUMS}; it was added"
    length = 12 if listed[:12] != found[:12] else None
    return f"{name}: expected sha256 {show_unprintable(listed[:length])}, got {found[:length]}; it was changed"
