"""What tests have a warm process do; a spawned process must find these by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pipeline.errors import SettingsError

state: list[str] = []  # of the process


def prepare(word: str, *_: object) -> None:
    """Leave a mark in the warm process; once, as an import does."""
    if "prepared" not in state:
        state.append("prepared")
    if word == "broken":
        raise ImportError("no such library")


def show_state(word: str) -> None:
    """Print what this process began with, then change it."""
    print(*state, os.environ.get("WARM_WORD", "unset"), flush=True)
    state.append(word)
    os.environ["WARM_WORD"] = word


def print_lines(_word: str) -> None:
    """Print to both streams, and end without a newline."""
    print("one\ntwo")
    print("three", file=sys.stderr)
    os.write(1, b"four")


def print_word(word: str) -> None:
    """Print it."""
    print(word)


def fail(word: str) -> None:
    """Raise what a user can act on, or a mistake of ours."""
    raise SettingsError("serving: expected x") if word == "user" else ZeroDivisionError("a mistake")


def end_by_signal(_word: str) -> None:
    """End as a process does that the kernel kills."""
    os.kill(os.getpid(), signal.SIGKILL)


def meet(_word: str, folder: Path, num: int) -> None:
    """Return once so many tasks run."""
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < num:
        if time.monotonic() > deadline:
            raise TimeoutError("alone")
        time.sleep(0.01)


def end_on_request(_word: str) -> None:
    """Have this process and the warm one asked to end, as `timeout` asks all of a group."""
    for process in (os.getppid(), os.getpid()):
        os.kill(process, signal.SIGTERM)
    time.sleep(60)


def kill_parent_and_wait(_word: str, file: Path) -> None:
    """End the warm process, and go on."""
    file.write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
