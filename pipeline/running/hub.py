"""Where a checkpoint lies on this disk: its folder in the project, or its files in the cache of huggingface_hub.

A pinned model is downloaded once, by whichever stage asks first: that is `env`, which checks every checkpoint. From
then on its files are read from the library's own cache (`HF_HOME`), and nothing is asked of the network. The library
keeps the list of a commit's files, so that a download that was killed is noticed, and goes on where it stopped.
Pickles and code are never downloaded. Other programs may put more files of the commit into the cache. So the checkpoint
is a folder of links under build/hub/, which has the same files on every machine; it is safe to delete.

Not covered: whether a file in the cache was damaged there. A cut weights file is noticed by its header, and `optimize`
digests all of them.
"""

from __future__ import annotations

import contextlib
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from pipeline.errors import CheckpointError
from pipeline.records.digests import TEXT_FILES
from pipeline.settings.base import BUILD
from pipeline.settings.hub_names import SCHEME, PinnedModel, parse_pinned

LINKS = BUILD / "hub"
E = TypeVar("E", bound=BaseException)

# a name with a subfolder in it is another copy of the weights, such as "original/" or "onnx/"
_FILES = (
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    *TEXT_FILES,
)


def locate_checkpoint(reference: str, root: Path, *, may_download: bool = True) -> Path:
    """Return the folder of a checkpoint; a pinned model is linked there, and downloaded where the cache lacks it.

    Args:
        reference: a folder, or `hf://ORG/NAME@REVISION`.
        root: project root, which a folder is relative to.
        may_download: else a model that the cache lacks is refused.

    Raises:
        CheckpointError: the model can't be downloaded, or may not be.
    """
    pinned = parse_pinned(reference)
    if pinned is None:
        return root / reference
    from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        # of a folder without the list of its files nobody can say whether some are missing
        get_cached_repo_tree(pinned.repository, revision=pinned.revision)
        snapshot = snapshot_download(
            pinned.repository, revision=pinned.revision, allow_patterns=list(_FILES), local_files_only=True
        )
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        if not may_download:
            raise CheckpointError(
                f"{reference}: expected all of its files in the cache {constants.HF_HUB_CACHE}, found none or a part; "
                "run `dvc repro`, whose stage env downloads it"
            ) from None
        snapshot = _download(pinned)
    return _link(Path(snapshot), root / LINKS / f"{pinned.repository.replace('/', '--')}@{pinned.revision}")


def _link(snapshot: Path, folder: Path) -> Path:
    """Link the files of a snapshot that make the checkpoint into a folder, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in snapshot.iterdir():
        link = folder / file.name
        if not any(fnmatch(file.name, pattern) for pattern in _FILES) or _leads_to(link, file):
            continue
        link.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # of another process, which links the same
            link.symlink_to(file)
    return folder


def _leads_to(link: Path, file: Path) -> bool:
    return link.is_symlink() and link.readlink() == file


def _download(pinned: PinnedModel) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    name = f"{SCHEME}{pinned.repository}@{pinned.revision}"
    print(f"downloading {name} from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return str(snapshot_download(pinned.repository, revision=pinned.revision, allow_patterns=list(_FILES)))
    except Exception as error:  # errors of its HTTP client too, which share no class with its own
        raise CheckpointError(
            f"{name}: expected the model at {constants.ENDPOINT}, as the cache "
            f"{constants.HF_HUB_CACHE} does not have all of it; {_explain(error)}"
        ) from error


def _explain(error: Exception) -> str:
    """Say why a download failed, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    causes = (error, error.__cause__, error.__context__)

    def find(kind: type[E]) -> E | None:
        return next((cause for cause in causes if isinstance(cause, kind)), None)

    if find(OfflineModeIsEnabled):
        return (
            "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: unset it for one run of stage env, or copy the cache of a "
            "machine that has it"
        )
    if find(GatedRepoError):
        return "its owner asks to accept conditions: do so on its page, and set HF_TOKEN"
    if find(RevisionNotFoundError):
        return "it has no such commit: copy one from its history"
    if find(RepositoryNotFoundError):
        return "there is none of that name, or it is private: correct the name, or set HF_TOKEN"
    if (refusal := find(HfHubHTTPError)) and refusal.response.status_code in (401, 403):
        return f"the hub refused with HTTP {refusal.response.status_code}: set HF_TOKEN to one that may read it"
    message = " ".join(str(error).split())[:200]
    return f"got {type(error).__name__}: {message}; check the network and HF_ENDPOINT, and run it again"
