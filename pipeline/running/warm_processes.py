"""A process that has imported what tasks need, and gives each task a process of its own: a copy of itself.

Importing torch and its friends takes longer than much of the work, and a copy (`os.fork`) has them at once. A task
changes what belongs to its process: threads, seeds, number formats, environment, a library's session. Each begins with
what the imports left, and nothing of it reaches the next.

Copying is safe while nothing but imports was done: no thread of torch runs yet, and no GPU was asked for anything.
Where there is a GPU, prepare nothing: some libraries ask it while they are imported, and a copy could not use it.

Whoever started the process shows each line that a task prints, behind the task's label. A task ends with the warm
process, and that one with whoever started it, killed or not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from pipeline.errors import QuantgateError
from pipeline.records.plain_text import format_line
from pipeline.running.importing import pause_collection
from pipeline.running.quiet import silence_torchao
from pipeline.running.worker_pool import end_with_parent

INTERRUPTED = 130
LOST = -signal.SIGKILL  # the exit code of a task whose warm process died
_CHUNK = 1 << 16


class WarmProcess:
    """The process as others see it. Use as a context manager; several threads may run tasks at once."""

    def __init__(self, prepare: Callable[..., None], *, show: Callable[[str], None] | None = None) -> None:
        """Start it.

        Args:
            prepare: a function of a module. It is given the arguments of each task ahead of it, and imports what the
                task needs. What it raises is for the task to meet.
            show: is given each line that a task prints, by another thread; None: lines go to stdout.
        """
        self._show = show or partial(print, flush=True)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, prepare))
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[int]] = {}
        self._num_tasks = 0
        self._is_gone = False
        threading.Thread(target=self._read, daemon=True, name="warm-process").start()

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and with it all tasks."""
        self._process.kill()
        self._process.join()

    @property
    def is_gone(self) -> bool:
        """It has ended, by whatever way."""
        return self._is_gone

    def run(self, label: str, function: Callable[..., None], *args: Any) -> int:
        """Run a task in a process of its own; return its exit code, 0 for one that raised nothing.

        Args:
            label: begins each line that it prints.
            function: of a module.
            args: its arguments, pickled.
        """
        future: Future[int] = Future()
        with self._lock:
            if self._is_gone:
                return LOST
            self._num_tasks += 1
            self._waiting[self._num_tasks] = future
            with contextlib.suppress(OSError):  # it has just died, as the other thread will see
                self._connection.send((self._num_tasks, label, function, args))
        return future.result()

    def _read(self) -> None:
        """Hand over lines and exit codes as they come; all tasks are lost with the process."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                said = self._connection.recv()
                if isinstance(said, str):
                    with contextlib.suppress(OSError, ValueError):  # who reads it has gone, or has no such letter
                        self._show(said)
                else:
                    number, code = said
                    self._waiting.pop(number).set_result(code)
        with self._lock:
            self._is_gone = True
        for future in self._waiting.values():
            future.set_result(LOST)


@dataclass
class _Task:
    """A task in its process, as the warm process sees it."""

    number: int
    label: str
    process: Any
    output: int  # where to read what it prints
    show: Callable[[str], None]
    line: bytes = b""  # that has not ended yet

    def show_new(self) -> bool:
        """Show whole lines of what came since; return whether more may come."""
        try:
            data = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return False
        *lines, self.line = (self.line + data).split(b"\n")
        for line in lines:
            self._show(line)
        return bool(data)

    def show_rest(self) -> None:
        """Show what came to the end, also of a line that has none."""
        while self.show_new():
            pass
        if self.line:
            self._show(self.line)

    def _show(self, line: bytes) -> None:
        self.show(f"{self.label}: {line.decode(errors='replace')}")


def _serve(connection: Connection, prepare: Callable[..., None]) -> None:
    """Start a process for each task that comes, until nobody is left who could send one."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all at once, the tasks hear of it, too, and say so
        signal.signal(number, signal.SIG_IGN)
    for file in (sys.stdout, sys.stderr):  # no task ends for a letter that the terminal's encoding lacks
        file.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    silence_torchao()
    tasks: list[_Task] = []
    while True:
        ready = wait([connection, *(task.output for task in tasks), *(task.process.sentinel for task in tasks)])
        for task in list(tasks):
            if task.output in ready:
                task.show_new()
            if task.process.sentinel in ready:
                tasks.remove(task)
                _tell(connection, (task.number, _finish(task)))
        if connection in ready:
            try:
                number, label, function, args = connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # tasks notice
            with contextlib.suppress(Exception), pause_collection():
                prepare(*args)
            tasks.append(_start(connection, number, label, function, args))


def _start(connection: Connection, number: int, label: str, function: Callable[..., None], args: Any) -> _Task:
    output, written = os.pipe()
    os.set_blocking(output, False)
    process = multiprocessing.get_context("fork").Process(target=_work, args=(connection, written, function, args))
    process.start()
    os.close(written)
    return _Task(number, label, process, output, partial(_tell, connection))


def _tell(connection: Connection, said: Any) -> None:
    """Hand something to whoever started this process; end with it, as the tasks then do."""
    try:
        connection.send(said)
    except OSError:
        os._exit(1)


def _finish(task: _Task) -> int:
    """Show the rest, and return the exit code."""
    task.process.join()  # its end is told before the system has closed what it wrote to
    task.show_rest()
    os.close(task.output)
    code: int = task.process.exitcode
    return code


def _work(connection: Connection, output: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run a task in the process that was made for it; what a user can act on is one line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection.close()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threading.Thread(target=end_with_parent, daemon=True, name="parent-watch").start()
    try:
        function(*args)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (QuantgateError, OSError) as error:
        print(format_line(str(error)), file=sys.stderr)
        raise SystemExit(1) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
