"""Server processes: started with a log, watched, and gone when we are gone.

Every server's standard input is a pipe that we hold open, and it closes when we end in whatever way. The
server, or the keeper in front of it, takes that as the order to stop.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import EngineError

STOP_TIMEOUT_S = 5.0
FAILURE = "failure"  # the key of the line in which our own launcher says why it ends
_NOISE = re.compile(
    r"^\s*(File \"|\^|~|\||$)|^Traceback|^\s{2,}(?!what\(\))|Loading weights|\d%\||^[IW]\d{4} \d\d:\d\d:"
    r"|^(Run|See) '(docker|podman)\b.*--help'"  # behind what it is about
)
# what a logger puts before the text: "(EngineCore pid=7) ERROR 11-21 15:12:22 [core.py:88] "
_LOG_PREFIX = re.compile(r"^(\(\w+ pid=\d+\)\s*)?((INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?")
_CAUSE = re.compile(r"\b\w*(Error|Exception)\b: \S|(^|\s)error: \S|Value error, ")
# points at an error elsewhere
_POINTER = re.compile(r"[Ee]ngine core init|See root cause|Failed core proc|EngineDeadError|validation errors? for ")
_REFUSAL = re.compile(r"RequestValidationError")  # of one request, whose client has the answer


@dataclass
class ServerProcess:
    """One server process and its log."""

    popen: subprocess.Popen[bytes]
    log: Path

    def check_alive(self) -> None:
        """Raise EngineError when the process has ended."""
        if (code := self.popen.poll()) is not None:
            raise self.failure(format_exit(code))

    def failure(self, what: str) -> EngineError:
        """Describe a failure with the line of the log that says most."""
        return EngineError(f"server {self.log.stem}: {what}: {read_cause(self.log)} (log: {self.log})")


def spawn(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], log: Path, stdout: int | None = None
) -> ServerProcess:
    """Start a server.

    Args:
        command: program and arguments.
        folder: where it runs.
        environment: all of its variables.
        log: file for what it writes; truncated first.
        stdout: `subprocess.PIPE` to read what it announces there, None to log that too.

    Raises:
        EngineError: the program can't be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as log_file:
            popen = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,  # held open for as long as we live: the server ends when it closes
                stdout=log_file if stdout is None else stdout,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C reaches us, and we end the servers
            )
    except OSError as error:
        raise EngineError(
            f"server {log.stem}: expected a program at {command[0]!r}, got: {error.strerror}; correct "
            "the engine's command"
        ) from None
    return ServerProcess(popen, log)


def stop(processes: Sequence[ServerProcess]) -> None:
    """Kill servers and wait for their end."""
    for process in processes:
        process.popen.kill()
    for process in processes:
        _release(process, STOP_TIMEOUT_S)


def stop_kept(process: ServerProcess, timeout_s: float) -> None:
    """Tell a keeper to stop its server and wait until both have ended; kill it when that takes too long."""
    if process.popen.stdin is not None:
        with contextlib.suppress(OSError):
            process.popen.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.popen.wait(timeout_s)
    process.popen.kill()
    _release(process, STOP_TIMEOUT_S)


def _release(process: ServerProcess, timeout_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.popen.wait(timeout_s)
    for stream in (process.popen.stdin, process.popen.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def format_exit(code: int) -> str:
    """Say how a process ended."""
    return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"


def read_cause(log: Path) -> str:
    """Return the last line of a log that names a cause, else one that points at it, else the last that says something.

    Our own launcher says it in JSON.
    Traceback frames, progress bars and hints at docker's help say nothing, nor does a request that was refused.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if (failure := _read_failure(text)) is not None:
        return failure
    lines = [_LOG_PREFIX.sub("", line) for line in re.split(r"[\r\n]+", text)]
    messages = [line.strip()[:300] for line in lines if not _NOISE.search(line) or "Value error, " in line]
    errors = [line for line in messages if _CAUSE.search(line) and not _REFUSAL.search(line)]
    causes = [line for line in errors if not _POINTER.search(line)]
    explanations = causes or errors or messages
    return explanations[-1] if explanations else "its log says nothing"


def _read_failure(text: str) -> str | None:
    """Return what our own launcher says last; None in the log of another server, or of one that was killed."""
    for line in reversed(text.splitlines()):
        if line.startswith(f'{{"{FAILURE}": '):
            with contextlib.suppress(ValueError, KeyError):
                return " ".join(str(json.loads(line)[FAILURE]).split())
    return None
