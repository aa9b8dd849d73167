"""Is there what starts an engine: its program, and behind docker or podman whoever runs containers?

Asked before any work. Not covered: the image that a container is made of, and what is in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from itertools import takewhile
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.products.text.settings import CONTAINER_PROGRAMS, TextProduct, VllmEngine

ASK_TIMEOUT_S = 10.0
_COMMANDS = ("container", "compose", "run", "exec")  # of a container program, behind its own options
_MAX_SHOWN = 300  # characters of what a program says


def check_commands(product: TextProduct, root: Path, *, is_local: bool) -> list[str]:
    """Refuse an engine's command that can't start it here; warn where that may not matter.

    It does not where a cluster's nodes have what this one lacks, nor where the candidate was evaluated: whoever pulled
    that may judge it without the engine.

    Args:
        product: settings.
        root: of the project, where engines are started.
        is_local: work is done on this machine.

    Raises:
        SettingsError: with the path of the key.
    """
    problems = {
        name: f"candidates.{name}.engine.command: {problem}"
        for name, candidate in product.candidates.items()
        if isinstance(candidate.engine, VllmEngine) and (problem := _find_problem(candidate.engine, root))
    }
    for name, problem in problems.items():
        if is_local and not (root / product.build / "evaluations" / name).is_dir():
            raise SettingsError(problem)
    return list(problems.values())


def _find_problem(engine: VllmEngine, root: Path) -> str | None:
    program, *words = engine.command
    environment = os.environ | engine.environment
    path = shutil.which(str(root / program) if "/" in program else program, path=environment.get("PATH"))
    if path is None:
        return (
            f"expected a program, found no {program!r} here: the candidate can't be served; install vLLM in an "
            "environment of its own, and name its `vllm`"
        )
    if Path(program).name not in CONTAINER_PROGRAMS:
        return None
    options = list(takewhile(lambda word: word not in _COMMANDS, words))  # such as --context
    said = _ask_containers(path, *options, environment=tuple(engine.environment.items()))
    return said and (
        f"expected an answer to `{program} version`, got: {said.rstrip('.')}; start what runs its containers, or name "
        "another command"
    )


@cache  # most candidates share a command
def _ask_containers(*command: str, environment: tuple[tuple[str, str], ...]) -> str | None:
    """Return what a container program says where it can't reach what runs its containers; None: it can."""
    try:
        asked = subprocess.run(
            [*command, "version"],
            env=os.environ | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=ASK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"none within {ASK_TIMEOUT_S:g} s"
    except OSError as error:
        return str(error.strerror)
    said = " ".join(asked.stderr.decode(errors="replace").split())[:_MAX_SHOWN]
    return (said or f"exit code {asked.returncode}") if asked.returncode else None
