"""What runs on the nodes of a Ray cluster: one replica of a candidate, and the server of the driver's files.

Ray sends this module itself, so that a node needs no copy of the project: it imports nothing of it before `begin`, and
nothing but Ray and what comes with Python. A replica works in the project's folder where its node sees it, and else in
a copy that is put together from files by their digests; each is fetched once a node.

Driver's side: `ray_replica.py` and `ray_cluster.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

CHUNK = 16 << 20  # bytes that travel at once
CACHE = Path("~/.cache/quantgate/files")  # of a node, by digest


@dataclass(frozen=True)
class SentFile:
    """A file of the driver's project: path relative to it, and sha256."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Order:
    """What a replica serves, in words alone: the rest is read from params.yaml."""

    candidate: str
    build: str  # folder of the product's results, relative to the project
    environment: Mapping[str, str]  # of the driver, that can change an answer


class FileServer:
    """Gives the driver's files to nodes that do not see them; runs on the driver's node."""

    def __init__(self, root: str) -> None:
        """Serve files below a folder."""
        self._root = Path(root)

    def read(self, path: str, offset: int) -> bytes:
        """Return the next bytes of a file; none at its end."""
        return read_chunk(self._root / path, offset)


class Replica:
    """One candidate, loaded or served once, that evaluates shard after shard, or several at once."""

    def __init__(self) -> None:
        """Make a folder for what is made here; it ends with the process."""
        self._scratch = Path(tempfile.mkdtemp(prefix="quantgate-"))
        self._build = self._scratch / "build"
        self._stack = contextlib.ExitStack()
        self._open: Any = None  # what the candidate's kind opened
        self._opening, self._counting = threading.Lock(), threading.Lock()
        self._num_running = 0
        self._unopened: Exception | None = None  # why it could not be opened

    def look(self, root: str, token: str) -> tuple[str, bool]:
        """Return the host's name, and whether it sees the driver's folder, in which a file of this name lies."""
        return socket.gethostname(), (Path(root) / token).is_file()

    def fetch(self, files: Sequence[SentFile], server: Any) -> str:
        """Put a copy of the driver's project together; return its folder."""
        root = self._scratch / "project"
        for file in files:
            kept = CACHE.expanduser() / file.sha256[:2] / file.sha256
            with lock_file(kept):
                if not kept.is_file():
                    receive(kept, partial(_ask, server, file.path))
                    check_received(kept, file)
            target = root / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            link(kept, target)
        return str(root)

    def begin(self, root: str, order: Order) -> None:
        """Work in a project's folder, as a stage does, with the driver's environment."""
        os.chdir(root)
        sys.path.insert(0, root)
        self._order = order
        from pipeline.records.fingerprints import read_environment

        # Ray sets the number of threads, which the driver may not have set
        for name in read_environment():
            if name not in order.environment:
                del os.environ[name]
        os.environ.update(order.environment)
        made = Path(order.build) / "candidates" / order.candidate
        self._build.mkdir(parents=True)
        if made.is_dir():
            (self._build / "candidates").mkdir()
            (self._build / "candidates" / order.candidate).symlink_to(made.resolve())

    def open(self, _begun: None) -> None:
        """Open the candidate; what `begin` returned is taken so that Ray keeps the order."""
        with self._name_driver_folder(), self._close_with_failure():
            self._find_open()

    def run(self, number: int, count: int, earlier: Mapping[str, bytes]) -> int:
        """Evaluate one shard; return the number of its entries.

        Args:
            number: of the shard, from 1.
            count: how many there are.
            earlier: what the driver holds of former attempts at it, by eval.
        """
        from pipeline.running.shards import Shard

        shard = Shard(number, count)
        home = self._build / "shards" / self._order.candidate / shard.folder / "0-earlier"
        for name, entries in earlier.items():
            home.mkdir(parents=True, exist_ok=True)
            (home / f"{name}.jsonl").write_bytes(entries)
        with self._name_driver_folder(), self._close_with_failure():
            return int(self._find_open().run(shard))

    def _find_open(self) -> Any:
        """Return what the candidate's kind opened, and have it opened first by whoever comes first."""
        with self._opening:
            if self._unopened is not None:
                raise self._unopened
            if self._open is None:
                try:
                    self._open = self._stack.enter_context(self._do("open_replica"))
                except Exception as error:
                    self._unopened = error
                    raise
            return self._open

    def read_new(self, known: Mapping[str, int]) -> list[tuple[str, int, bytes]]:
        """Return what attempts hold beyond what the driver has: path in the shards' folder, offset, bytes.

        Args:
            known: bytes of each file that the driver has; whole entries.
        """
        home = self._build / "shards" / self._order.candidate
        new = []
        for path in sorted(home.glob("*/*/*.json*")):
            name = path.relative_to(home).as_posix()
            if path.parent.name == "0-earlier" or path.name.startswith("."):
                continue
            offset = 0 if path.suffix == ".json" else known.get(name, 0)
            data = read_chunk(path, offset)
            if path.suffix == ".jsonl":
                # whole entries; one of a large picture is longer than a chunk
                while b"\n" not in data and (more := read_chunk(path, offset + len(data))):
                    data += more
                data = data[: data.rfind(b"\n") + 1]
            if data or name not in known:  # an empty file says that there was nothing to do
                new.append((name, offset, data))
        return new

    def prepare(self, number: int, count: int) -> bytes | None:
        """Do this replica's part of what comes after the shards; None where that is not divided."""
        with self._name_driver_folder(), self._close_with_failure():
            prepared: bytes | None = self._open.prepare(number, count)
            return prepared

    def finish(self, files: Sequence[str], server: Any, prepared: Sequence[bytes]) -> None:
        """Evaluate the whole from the shards that the driver holds, on a device like theirs.

        Args:
            files: paths of the shards' files in the driver's project.
            server: gives them.
            prepared: by replicas, of what comes after the shards; what is missing is done here.
        """
        folder = self._build / "shards" / self._order.candidate
        shutil.rmtree(folder, ignore_errors=True)
        home = f"{self._order.build}/shards/{self._order.candidate}/"
        for path in files:
            receive(folder / path.removeprefix(home), partial(_ask, server, path))
        with self._name_driver_folder(), self._close_with_failure():
            if self._open is None:
                self._do("evaluate")
            else:
                self._open.finish(prepared)

    def make(self) -> str:
        """Build the candidate where its stage does; return a line that says what it became."""
        self._build = Path(self._order.build)
        return str(self._do("optimize"))

    def list_made(self, folder: str) -> list[str]:
        """Return the files of a folder of results, relative to it."""
        home = self._build / folder / self._order.candidate
        return [path.relative_to(home).as_posix() for path in sorted(home.rglob("*")) if path.is_file()]

    def read_made(self, folder: str, path: str, offset: int) -> bytes:
        """Return the next bytes of a file of results; none at its end."""
        return read_chunk(self._build / folder / self._order.candidate / path, offset)

    @contextlib.contextmanager
    def _name_driver_folder(self) -> Iterator[None]:
        """Let errors name the driver's folder instead of the one here, which is gone when they are read."""
        try:
            yield
        except Exception as error:
            error.args = tuple(str(part).replace(str(self._build), self._order.build) for part in error.args)
            raise

    @contextlib.contextmanager
    def _close_with_failure(self) -> Iterator[None]:
        """Close what the candidate's kind opened with an error of its work: it knows what a dead process means.

        What else is at work here goes on, until whoever hears of the error ends this process.
        """
        with self._counting:
            self._num_running += 1
        try:
            yield
        except Exception as error:
            opened = contextlib.ExitStack()
            with self._counting:
                if self._num_running == 1:
                    opened, self._stack, self._open = self._stack, opened, None
            opened.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            with self._counting:
                self._num_running -= 1

    def _do(self, method: str) -> Any:
        """Call what a stage calls; by its name, as the code of one stage must not become that of the other."""
        kind, product = self._find_product()
        return getattr(kind, method)(self._order.candidate, product, root=Path(), build=self._build)

    def _find_product(self) -> tuple[Any, Any]:
        from pipeline.products import KINDS
        from pipeline.products.params import find_owner, load_params
        from pipeline.settings.base import Product

        product = find_owner(load_params(), self._order.candidate, kind=Product)
        return KINDS[product.kind], product.use_workers(1)


def _ask(server: Any, path: str, offset: int) -> bytes:
    import ray

    data: bytes = ray.get(server.read.remote(path, offset))
    return data


def read_chunk(path: Path, offset: int) -> bytes:
    """Return the next bytes of a file, from an offset; none at its end."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK)


def receive(target: Path, read: Callable[[int], bytes]) -> None:
    """Write a file from the chunks that `read` gives by their offset, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    with partial.open("wb") as file:
        while chunk := read(file.tell()):
            file.write(chunk)
    partial.replace(target)


def check_received(path: Path, file: SentFile) -> None:
    """Refuse a file that is not what the driver digested."""
    with path.open("rb") as received:
        came = hashlib.file_digest(received, "sha256").hexdigest()
    if came != file.sha256:
        path.unlink()
        raise OSError(0, f"{file.path}: expected content {file.sha256[:12]}, got {came[:12]}: it changed meanwhile")


def link(source: Path, target: Path) -> None:
    """Link a file of the cache into a project, or copy it where they lie on two disks."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Keep the other replicas of this node from fetching the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
