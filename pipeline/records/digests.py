"""Content digests and canonical JSON: how quantgate knows that two things are the same.

A digest covers content only, never a path, a time or a host, so moving a folder changes nothing
and changing one byte of a weight changes it. All digests are sha256 in lower-case hex.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def canonical_json(value: Any) -> str:
    """Render JSON data so that equal data gives equal text (sorted keys, no spaces, no NaN)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_bytes(data: bytes) -> str:
    """Return the sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_text(text: str) -> str:
    """Return the sha256 of a text's UTF-8 bytes."""
    return digest_bytes(text.encode())


def digest_json(value: Any) -> str:
    """Return the sha256 of the canonical JSON of `value`."""
    return digest_text(canonical_json(value))


def digest_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_pixels(picture: NDArray[np.uint8]) -> str:
    """Return the sha256 of a picture's pixels, (rows, columns, 3), colour by colour: what its record calls `output`."""
    return hashlib.sha256(picture.transpose(2, 0, 1).tobytes()).hexdigest()


# what stands beside a checkpoint without being part of it
NOT_CONTENT = frozenset({"README", "README.md", "card.yaml", "card.md", "card.json", ".gitignore", ".gitattributes"})


# what turns text into token ids and sets sampling defaults: copied byte by byte, never re-saved
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def digest_checkpoint(folder: Path) -> str:
    """Return the digest of a checkpoint folder: its files, less the notes about them."""
    return digest_folder(folder, ignore=NOT_CONTENT)


def digest_folder(folder: Path, *, ignore: frozenset[str] = frozenset()) -> str:
    """Return one digest for a folder: names relative to it and the digest of each file."""
    return digest_json(digest_files(folder, ignore=ignore))


def list_files(folder: Path, *, ignore: frozenset[str] = NOT_CONTENT) -> dict[str, Path]:
    """Return the files of a folder that count, by their names relative to it; symbolic links are followed."""
    files = sorted(p for p in _walk(folder, (os.path.realpath(folder),)) if p.name not in ignore)
    return {p.relative_to(folder).as_posix(): p for p in files}


def _walk(folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files below a folder; a link to one that holds a folder on the way here, `above`, is not followed."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_file():
            yield path
        elif path.is_dir() and path.name != "__pycache__":
            real = os.path.realpath(path)
            if not any(Path(one).is_relative_to(real) for one in above):
                yield from _walk(path, (*above, real))


def digest_files(
    folder: Path, *, ignore: frozenset[str] = NOT_CONTENT, known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return the digest of each file of a folder by its name relative to it.

    Each core that this process may use digests a file at a time.

    Args:
        folder: the folder to read, recursively; symbolic links are followed.
        ignore: file names (not paths) that do not count, for example a README.
        known: digests of files that need not be read, by name.
    """
    files = list_files(folder, ignore=ignore)
    unknown = {name: path for name, path in files.items() if name not in known}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    with ThreadPoolExecutor(len(cores)) as pool:  # hashing lets other threads run
        digests = dict(zip(unknown, pool.map(digest_file, unknown.values()), strict=True))
    return {name: known[name] if name in known else digests[name] for name in files}


def name_changed_file(before: dict[str, str], after: dict[str, str]) -> str:
    """Say which file is the first that differs between two folders, as far as their files are known."""
    if not before or not after:
        return "which file differs is not known"
    for name in sorted(before | after):
        if name not in before or name not in after:
            return f"{name} is {'gone' if name in before else 'new'}"
        if before[name] != after[name]:
            return f"{name} differs"
    return "no file differs"
