"""Which files of a folder are to be judged: all, but for what is known to be no data.

An eval that nobody reads is an eval that nobody misses. So the list is of what may lie beside records: texts, pictures
and pages for people, settings and scripts, the results that lm-eval computes from its samples, the lists that
`inspect eval-set` keeps of its logs, and what quantgate's own index seals. Any other file must have a reader,
whatever it is called: it is read, or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.outcomes import case_records, inspect_ai, lm_eval

_TEXTS = (".md", ".rst", ".txt", ".log", ".out", ".err", ".html", ".htm", ".css", ".js", ".xml", ".pdf")
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
_SETTINGS = (".yaml", ".yml", ".toml", ".ini", ".cfg", ".lock", ".py", ".sh", ".ipynb")
_NAMES = {
    "license",
    "readme",
    "makefile",
    "sha256sums",
    ".ds_store",
    "thumbs.db",
    ".gitignore",
    ".gitattributes",
    ".gitkeep",
}
_DATA = (".csv", ".tsv", ".jsonl", ".json", ".eval")
# a tool's own files there are none of these
_TOOL_FOLDERS = {".git", ".cache", ".dvc", ".ipynb_checkpoints", "__pycache__"}


def list_files(folder: Path) -> list[Path]:
    """Return the files of a folder and of those in it that have to be judged; a linked folder counts as a file.

    Raises:
        EvidenceError: an index of quantgate's own records is malformed.
    """
    found = [path for path in sorted(_walk(folder)) if not _is_beside(path)]
    sealed: set[Path] = set()
    indexed: list[Path] = []
    for index in [path for path in found if path.name == case_records.INDEX]:
        indexed += case_records.list_files(index.parent)  # those that are missing, too
        sealed |= {index, *case_records.list_sealed(index.parent)}
    return list(dict.fromkeys([*indexed, *(path for path in found if path not in sealed)]))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink() or not path.is_dir():
            yield path
        else:
            is_tools = path.name in _TOOL_FOLDERS
            yield from (found for found in _walk(path) if not is_tools or found.suffix.lower() in _DATA)


def _is_beside(path: Path) -> bool:
    """Say whether a file is no data, by its name."""
    is_named = path.name.lower() in _NAMES or lm_eval.is_results(path) or inspect_ai.is_beside_logs(path)
    return is_named or path.suffix.lower() in (*_TEXTS, *_PICTURES, *_SETTINGS)
