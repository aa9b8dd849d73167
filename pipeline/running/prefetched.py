"""What `quantgate prefetch` made ahead of a stage, until the stage takes it over.

DVC removes a stage's outputs before it runs the stage, so each result also lies in a place of its own, as links to the
same files where the disk has them:

    build/<product>/prefetched/<stage>/<candidate>/       what the stage would write
                                       <candidate>.json   the digest of its inputs, and of each file; written last

A stage that DVC runs takes a result over where the digest of its inputs is the same and no file of it is missing, new
or changed. The inputs are what DVC watches: the stage's entry in build/env/inputs.json with the code as it lies on
disk, build/env/libraries.json, and for `evaluate` the candidate's folder. To these come the machine and the variables
that can change an answer: a build folder may lie on a disk that several machines share.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.records.digests import digest_files, digest_folder, digest_json
from pipeline.records.files import replace_folder
from pipeline.records.fingerprints import read_environment
from pipeline.records.record_files import Record, read_record, write_record
from pipeline.running.journal import lock_candidate
from pipeline.running.progress import DVC_STAGE, tell_taken
from pipeline.running.stage_code import digest_code
from pipeline.settings.base import ENV, Product

_OUTPUTS = {"optimize": "candidates", "evaluate": "evaluations"}  # the folder of each stage's outputs
_EVERY_FILE: frozenset[str] = frozenset()  # notes count as well


class Kept(Record):
    """What a result was made of, and its files."""

    inputs: str
    files: dict[str, str]  # digest by name


@dataclass(frozen=True)
class Work:
    """What a stage makes of one candidate.

    Attributes:
        stage: "optimize" or "evaluate".
        candidate: its name.
        product: that owns the candidate.
    """

    stage: str
    candidate: str
    product: Product

    @property
    def target(self) -> Path:
        """The folder that the stage writes."""
        return self.product.build / _OUTPUTS[self.stage] / self.candidate

    @property
    def folder(self) -> Path:
        """The folder of what was made ahead."""
        return self.product.build / "prefetched" / self.stage / self.candidate

    @property
    def seal(self) -> Path:
        """The file that says of what it was made, beside it."""
        return self.folder.with_name(f"{self.candidate}.json")


def read_watched(stage: str, candidate: str) -> dict[str, str]:
    """Return the digests of settings, files and code that stage `env` found; nothing where it has not run."""
    watched: dict[str, str] = _read_json(ENV / "inputs.json").get(stage, {}).get(candidate, {})
    return watched


def digest_inputs_now(work: Work) -> str:
    """Return the digest of all that a result depends on; "" where stage `env` has not seen the code as it is."""
    watched = read_watched(work.stage, work.candidate)
    if watched.get("code") != digest_code(work.stage, work.product.kind):
        return ""
    made = work.product.build / _OUTPUTS["optimize"] / work.candidate
    return digest_json(
        [
            watched,
            _read_json(ENV / "libraries.json"),
            _read_json(ENV / "machine.json"),
            read_environment(),
            digest_folder(made) if work.stage == "evaluate" else "",
        ]
    )


def keep(work: Work, inputs: str) -> None:
    """Keep what lies where the stage would write it, for the stage to take over.

    Args:
        work: what was made.
        inputs: their digest, the same before and after.
    """
    work.seal.unlink(missing_ok=True)
    _link_folder(work.target, work.folder)
    write_record(work.seal, Kept(inputs=inputs, files=digest_files(work.folder, ignore=_EVERY_FILE)))


def put_back(work: Work, inputs: str) -> bool:
    """Put a result that was made ahead where the stage would write it, and keep it; say whether there is one."""
    if not _is_whole(work, inputs):
        return False
    if _digest_if_there(work.target) != digest_folder(work.folder, ignore=_EVERY_FILE):
        _link_folder(work.folder, work.target)
    return True


def take_over(stage: str, candidate: str, product: Product) -> bool:
    """Move what was made ahead to where the stage that DVC runs writes it; say whether there was any.

    A stage that is started by hand makes everything itself: nobody has asked stage `env` what was edited. What does not
    fit is removed: what the stage makes now takes its place.

    Raises:
        JournalError: another process works on the candidate.
    """
    work = Work(stage, candidate, product)
    if os.environ.get(DVC_STAGE) != f"{stage}@{candidate}" or not work.seal.is_file():
        return False
    with lock_candidate(product.build, candidate):
        fits = _is_whole(work, digest_inputs_now(work))
        if fits:
            work.target.parent.mkdir(parents=True, exist_ok=True)
            replace_folder(work.folder, work.target)
        work.seal.unlink()
        shutil.rmtree(work.folder, ignore_errors=True)
    if fits:
        tell_taken(f"{stage}@{candidate}")
    what = "taken over" if fits else "of other inputs or damaged, and not taken over"
    print(f"{candidate}: made ahead by `quantgate prefetch`, {what}", file=sys.stderr, flush=True)
    return fits


def _is_whole(work: Work, inputs: str) -> bool:
    """Say whether there is a result of these inputs, with the files that it was kept with."""
    try:
        kept = read_record(work.seal, Kept)
    except (EvidenceError, OSError):
        return False
    return bool(inputs) and kept.inputs == inputs and kept.files == digest_files(work.folder, ignore=_EVERY_FILE)


def _digest_if_there(folder: Path) -> str:
    return digest_folder(folder, ignore=_EVERY_FILE) if folder.is_dir() else ""


def _link_folder(source: Path, target: Path) -> None:
    """Put a copy of a folder in a place, whole or not at all; its files are links where the disk has them."""
    working = target.with_name(f".{target.name}.linked")
    shutil.rmtree(working, ignore_errors=True)
    shutil.copytree(source, working, copy_function=_link)
    replace_folder(working, target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _read_json(path: Path) -> dict[str, Any]:
    """Return a file of stage `env`; nothing where it has not run."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
