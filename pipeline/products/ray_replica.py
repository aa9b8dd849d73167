"""A replica on a Ray cluster as the driver sees it: its start, what goes wrong with it, the files that come from it.

What the replica does itself: `ray_worker.py`. Who gets which shard: `ray_cluster.py`. Ray is given, never imported.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import EngineError, QuantgateError
from pipeline.products.ray_worker import FileServer, Order, Replica, SentFile, receive
from pipeline.records.digests import digest_file
from pipeline.records.files import replace_folder
from pipeline.running.shards import Shard
from pipeline.settings.execution import RayExecution


class Project:
    """The driver's folder, as nodes see it or are sent it."""

    def __init__(self, ray: Any, list_files: Callable[[], list[Path]]) -> None:
        """Start the server of its files on this node.

        Args:
            ray: connected to a cluster.
            list_files: what a node needs of it that does not see the folder; asked when there is one.
        """
        self.root, self.token = str(Path.cwd()), f"build/.ray-{uuid.uuid4().hex}"
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        options = {"num_cpus": 0, "max_concurrency": 8, "scheduling_strategy": here}
        self.server = ray.remote(FileServer).options(**options).remote(self.root)
        self._list_files = list_files

    @cached_property
    def files(self) -> list[SentFile]:
        """All that a node without this folder needs."""
        return [SentFile(path.as_posix(), digest_file(path)) for path in self._list_files()]


@contextlib.contextmanager
def share_project(ray: Any, list_files: Callable[[], list[Path]]) -> Iterator[Project]:
    """Share this folder with replicas. A file in it, named like no other, tells a node whether it sees the folder."""
    project = Project(ray, list_files)
    token = Path(project.token)
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()
    try:
        yield project
    finally:
        token.unlink(missing_ok=True)


@dataclass
class RemoteReplica:
    """A replica as the driver sees it."""

    ray: Any
    actor: Any
    host: str = ""
    sees_root: bool = False  # the driver's folder
    shards: set[Shard] = field(default_factory=set)  # that it evaluates
    is_lost: bool = False  # it failed or died
    num_entries: int = 0  # that came from it
    known: dict[str, int] = field(default_factory=dict)  # bytes that came of each file
    asked: Any = None  # what is new; None: nothing is on its way

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.host or "a replica"

    def look(self, project: Project) -> Any:
        """Have it say where it is, and whether it sees the driver's folder; return what to wait for."""
        return self.actor.look.remote(project.root, project.token)

    def begin(self, order: Order, project: Project, seen: tuple[str, bool]) -> Any:
        """Give it its project, where it does not see it, and its order; return what to wait for.

        Args:
            order: what it serves.
            project: the driver's folder.
            seen: what it says of itself: its host, and whether it sees that folder.
        """
        self.host, self.sees_root = seen
        root = project.root if self.sees_root else self.actor.fetch.remote(project.files, project.server)
        return self.actor.begin.remote(root, order)

    def open(self, begun: Any) -> Any:
        """Have it open its candidate after what `begin` returned; return what to wait for."""
        return self.actor.open.remote(begun)

    def end(self) -> None:
        """End its process."""
        self.ray.kill(self.actor)

    def get(self, reference: Any) -> Any:
        """Return a result, or raise what a user can act on with the host where it was raised."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            problem = self.explain(error)
            remedy = "" if self.is_own(error) else "; run `dvc repro` to go on"
            raise EngineError(f"{problem}{remedy}") from None

    def is_own(self, error: Any) -> bool:
        """Say whether it raised an error itself; else its process or node ended, maybe with a result on it."""
        return isinstance(error, self.ray.exceptions.RayTaskError)

    def explain(self, error: Any) -> EngineError:
        """Return what a user can act on of an error of a call; raise one that is none of these as it is."""
        if not self.is_own(error):
            return EngineError(f"{self.name}: its worker ended by itself")
        if isinstance(error.cause, ImportError):
            said = f"expected the project's environment on this node: {error.cause}; install it there"
            return EngineError(f"{self.name}: {said}")
        if isinstance(error.cause, QuantgateError | OSError):
            return EngineError(f"{self.name}: {error.cause}")
        raise error

    def explain_start(self, error: Any) -> EngineError:
        """Return the same of an error of its start, whatever it is: other nodes may have what this one lacks."""
        with contextlib.suppress(self.ray.exceptions.RayTaskError):
            return self.explain(error)
        return EngineError(f"{self.name}: {type(error.cause).__name__}: {' '.join(str(error.cause).split())}")

    def take_new(self, folder: Path) -> None:
        """Take over what it has written, where it has answered: one that hangs keeps nobody waiting.

        Args:
            folder: where the driver keeps shards of its candidate.
        """
        if self.asked is not None and self.ray.wait([self.asked], timeout=0)[0]:
            # its end is dealt with where its shard is waited for
            with contextlib.suppress(self.ray.exceptions.RayError):
                self._write_new(self.ray.get(self.asked), folder)
            self.asked = None
        if self.asked is None:
            self.asked = self.actor.read_new.remote(dict(self.known))

    def take_rest(self, folder: Path, shard: Shard) -> None:
        """Take over all that it has written of a shard that it finished; beside it, it may go on to write others."""
        self.asked = None
        has_more = True
        while has_more:
            new = self.ray.get(self.actor.read_new.remote(dict(self.known)))
            self._write_new(new, folder)
            has_more = any(name.startswith(f"{shard.folder}/") and name.endswith(".jsonl") for name, _, _ in new)

    def _write_new(self, new: Sequence[tuple[str, int, bytes]], folder: Path) -> None:
        """Write to the driver's own files what came."""
        for name, offset, data in new:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json":
                path.write_bytes(data)
                continue
            with path.open("r+b" if path.exists() else "wb") as file:
                file.seek(offset)
                file.write(data)
            self.num_entries += data.count(b"\n")
            self.known[name] = offset + len(data)

    def fetch_made(self, folder: str, target: Path) -> None:
        """Put what it made in place, whole or not at all.

        Args:
            folder: of its results, relative to those of the product.
            target: the driver's folder.
        """
        made = target.with_name(f".{target.name}.new")
        shutil.rmtree(made, ignore_errors=True)
        for path in self.get(self.actor.list_made.remote(folder)):

            def read(offset: int, path: str = path) -> bytes:
                data: bytes = self.get(self.actor.read_made.remote(folder, path, offset))
                return data

            receive(made / path, read)
        replace_folder(made, target)


def start_replica(ray: Any, execution: RayExecution, at_once: int) -> RemoteReplica:
    """Start a replica somewhere on the cluster.

    Args:
        ray: connected to it.
        execution: the resources of a replica.
        at_once: shards that it evaluates at once.
    """
    resources = dict(execution.resources)
    options = {
        "num_cpus": resources.pop("CPU", 0 if "GPU" in resources else 1),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "max_concurrency": at_once + 1,  # it is asked what is new while it works
    }
    return RemoteReplica(ray, ray.remote(Replica).options(**options).remote())
