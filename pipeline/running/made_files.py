"""Files that git does not hold, as a script of the project makes them byte for byte: copies of models, pictures, texts.

`models/made.yaml` and `evalsets/made.yaml` say for each such folder which script makes it and what digests its files
must have. Stage `env`, `scripts/check_settings.py` and the tests make what is missing before they look at a checkpoint
or a picture: the first two what params.yaml names, the tests all. By hand, all:

    python -m pipeline.running.made_files

The lists lie above the folders, as a file in a checkpoint's folder is part of the checkpoint. A file gets its name
only after its digest was checked, by one run at a time, so that a kill leaves nothing half made. A file that is there
is never written over. Its digest is checked once for each list; after that a look is a `stat` a file. Not covered: a
file that is changed after that. DVC notices one of a checkpoint, the seal of the evalset one of its pictures.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from filelock import FileLock
from pydantic import StringConstraints, TypeAdapter, ValidationError
from ruamel.yaml.error import YAMLError

from pipeline.errors import EvalsetError, QuantgateError, SettingsError
from pipeline.evalsets.cases import CASES_FILE, MADE_LIST, PICTURE_DIGESTS
from pipeline.records.digests import digest_file, digest_json
from pipeline.records.files import read_lines, write_text
from pipeline.running.environment import count_cores
from pipeline.settings.base import BUILD, Settings, describe_yaml_error
from pipeline.settings.yaml_files import read_yaml

PLACES = ("models", "evalsets")  # a model is made before another one is made from it: the order is that of the list
_LOCK = BUILD / "made.lock"
_CHECKED = BUILD / "made.json"  # by folder, the digest of the list that its files were checked against
_MAKING = ".making"  # beside the folders, so that a move stays on one disk
_MODE = 0o644  # as git writes files; some libraries keep theirs for their own user
_DIGITS = 12  # of a digest in messages
_NOTING = threading.Lock()  # print writes a line and its end apart, and folders are made side by side
_LIBRARIES = ("numpy", "pillow", "torch", "safetensors")  # that write the files


class Recipe(Settings):
    """How the files of one folder are made; an entry of `made.yaml` under the folder's name."""

    module: str  # is run with the arguments and `--out FOLDER`
    arguments: list[str] = []
    # digests by name, or the file of cases that has both
    files: dict[str, Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]] | Literal["cases.jsonl"]


@dataclass(frozen=True)
class MadeFolder:
    """A folder whose files are made."""

    path: Path
    recipe: Recipe
    files: dict[str, str]  # digest by name in the folder

    @property
    def command(self) -> str:
        """The command as a person types it."""
        return " ".join(["python -m", self.recipe.module, *self.recipe.arguments, "--out", str(self.path)])

    def list_missing(self) -> list[str]:
        """List the files that are not there."""
        return [name for name in self.files if not (self.path / name).is_file()]


def make_missing(
    root: Path, note: Callable[[str], None] | None = None, *, named_in: Collection[str] | None = None
) -> None:
    """Make the files that are missing, and check once those that are there.

    Args:
        root: of the project; one without lists has nothing to make.
        note: is called with a line before a script runs, as that takes seconds.
        named_in: texts, of which some are paths from the root; other folders than these are left. None: all.

    Raises:
        QuantgateError: a script failed, or a file has another digest than its list says.
    """
    folders = list(read_folders(root))
    if named_in is not None:
        folders = _choose_named(folders, named_in, root)
    if not _list_open(folders, root):
        return
    (root / _LOCK).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(root / _LOCK):
        try:
            _make_all(_list_open(folders, root), root, note)
        finally:
            for place in PLACES:  # also what a run that was killed left there
                shutil.rmtree(root / place / _MAKING, ignore_errors=True)


def _make_all(folders: Sequence[MadeFolder], root: Path, note: Callable[[str], None] | None) -> None:
    """Make and check folders, one a core at once, each after those that it is made from; keep which are checked."""
    begun: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(count_cores()) as pool:
        for folder in folders:
            sources = [begun[path] for path in _list_paths(folder.recipe.arguments) if path in begun]
            begun[_name(folder, root)] = pool.submit(_make_and_check, folder, root, note, sources)
        for folder in folders:
            begun[_name(folder, root)].result()
            checked = _read_checked(root) | {_name(folder, root): digest_json(folder.files)}
            write_text(root / _CHECKED, json.dumps(checked, indent=2) + "\n")


def _make_and_check(
    folder: MadeFolder, root: Path, note: Callable[[str], None] | None, sources: Sequence[Future[None]]
) -> None:
    for source in sources:  # each was begun before, so that one is always at work
        source.result()
    if folder.list_missing():
        _make(folder, root, note)
    _check(folder, folder.path, "of the file that is there; delete it, and run this again to make it anew")


def _list_paths(texts: Iterable[str]) -> set[str]:
    return {os.path.normpath(text) for text in texts if text}


def _choose_named(folders: Sequence[MadeFolder], texts: Collection[str], root: Path) -> list[MadeFolder]:
    """Return the folders that are named, and those that they are made from."""
    named, chosen = _list_paths(texts), []
    for folder in reversed(folders):  # one that another is made from comes before it
        if _name(folder, root) in named:
            chosen.append(folder)
            named |= _list_paths(folder.recipe.arguments)
    return chosen[::-1]


def list_made_files(root: Path) -> list[Path]:
    """List every file of the lists, whether it is there or not."""
    return [folder.path / name for folder in read_folders(root) for name in folder.files]


def read_folders(root: Path) -> Iterator[MadeFolder]:
    """Read the lists of a project; a folder that was removed is not wanted.

    Raises:
        SettingsError: a list is malformed.
    """
    for place in PLACES:
        path = root / place / MADE_LIST
        if not path.is_file():
            continue
        try:
            recipes = TypeAdapter(dict[str, Recipe]).validate_python(read_yaml(path))
        except ValidationError as error:
            first = error.errors()[0]
            raise SettingsError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except YAMLError as error:
            raise SettingsError(f"{path}: {describe_yaml_error(error)}") from None
        for name, recipe in recipes.items():
            folder = path.with_name(name)
            if not folder.is_dir():
                continue
            files = recipe.files if isinstance(recipe.files, dict) else _read_pictures(folder / CASES_FILE)
            yield MadeFolder(folder, recipe, files)


def _read_pictures(cases: Path) -> dict[str, str]:
    """Return the digests of the pictures that cases name."""
    if not cases.is_file():
        raise EvalsetError(f"{cases}: expected cases, which name the pictures to make, found no file; take it from git")
    digests: dict[str, str] = {}
    for number, line in enumerate(read_lines(cases), start=1):
        try:
            case = json.loads(line)
            digests |= {case[name]: case[key] for name, key in PICTURE_DIGESTS.items() if name in case}
        except (ValueError, KeyError, TypeError) as error:
            raise EvalsetError(
                f"{cases}:{number}: expected a case with its pictures and their digests, got {type(error).__name__}: "
                f"{error}; correct the line, or take the file from git again"
            ) from None
    return digests


def _list_open(folders: list[MadeFolder], root: Path) -> list[MadeFolder]:
    """List the folders that miss a file, or were not checked against this list."""
    checked = _read_checked(root)
    return [f for f in folders if f.list_missing() or checked.get(_name(f, root)) != digest_json(f.files)]


def _read_checked(root: Path) -> dict[str, str]:
    try:
        return dict(json.loads((root / _CHECKED).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}  # then the files are checked again


def _name(folder: MadeFolder, root: Path) -> str:
    return folder.path.relative_to(root).as_posix()


def _make(folder: MadeFolder, root: Path, note: Callable[[str], None] | None) -> None:
    """Run the script of a folder, and move the missing files into place if they have their digests."""
    missing = folder.list_missing()
    if note:
        with _NOTING:
            note(f"{folder.path}: making {len(missing)} file{'s' * (len(missing) > 1)} by `{folder.command}`")
    making = folder.path.parent / _MAKING
    making.mkdir(parents=True, exist_ok=True)
    # a name of its own: the script of a process that was killed may still write
    out = making / Path(tempfile.mkdtemp(dir=making)).name / folder.path.name  # absolute from Python 3.12 on
    arguments = [*folder.recipe.arguments, "--out", str(out.relative_to(root))]
    command = [sys.executable, "-m", folder.recipe.module, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise QuantgateError(f"{folder.path}: `{folder.command}` failed: {reason}")
    _check(folder, out, _name_makers(folder))
    for name in missing:
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).chmod(_MODE)
        os.replace(out / name, folder.path / name)


def _check(folder: MadeFolder, where: Path, remedy: str) -> None:
    """Refuse files of other digests than the list has.

    Args:
        folder: that the files belong to.
        where: they lie.
        remedy: what to do, for the message.
    """
    for name, expected in folder.files.items():
        digest = digest_file(where / name) if (where / name).is_file() else "no file"
        if digest != expected:
            raise QuantgateError(
                f"{folder.path / name}: expected sha256 {expected[:_DIGITS]}, got {digest[:_DIGITS]} {remedy}"
            )


def _name_makers(folder: MadeFolder) -> str:
    """Say which script and libraries wrote a file, and how other ones come to be used."""
    versions = []
    for name in _LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return (
        f"from `{folder.command}` with {', '.join(versions)} on {platform.machine()}; run `make setup`, which installs "
        "the versions of constraints.txt, or copy the file from a checkout that has it"
    )


if __name__ == "__main__":
    try:
        make_missing(Path(), note=print)
    except QuantgateError as error:
        sys.exit(f"quantgate: {error}")
