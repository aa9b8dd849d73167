"""Turn a stage's outcome into an exit code and one readable line: the only place that does."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from pipeline.errors import QuantgateError, SettingsError
from pipeline.records.plain_text import format_line
from pipeline.running.progress import DVC_STAGE, begin_step, tell_cpu
from pipeline.running.quiet import silence_torchao


def read_name(argv: list[str], what: str) -> str:
    """Return the one name that a stage was given on its command line.

    Args:
        argv: the arguments.
        what: "candidate" or "product".

    Raises:
        SettingsError: none or several were given.
    """
    if len(argv) != 1:
        raise SettingsError(f"expected the name of one {what}, got {' '.join(argv)!r}")
    return argv[0]


def load_cluster() -> Any:
    """Return the module that works on a Ray cluster.

    By a name that is put together here: its code must not count as the stage's (`stage_code.py`), as where work is done
    changes no result.
    """
    return importlib.import_module(".".join(("pipeline", "products", "ray_cluster")))


def run_stage(name: str, main: Callable[[list[str]], int], *, is_short: bool = False) -> None:
    """Run `main(argv)` and exit with its code; an error a user can act on is one line on stderr, exit 1.

    Args:
        name: of the stage.
        main: takes the arguments and returns the exit code.
        is_short: the stage ends within seconds. Cyclic garbage is then left to the end of the process:
            looking for it takes a quarter of the time of importing mlflow.
    """
    silence_torchao()
    if stage := os.environ.get(DVC_STAGE):
        begin_step(stage)
    if is_short:
        gc.disable()
    try:
        sys.exit(main(sys.argv[1:]))
    except QuantgateError as error:
        print(f"quantgate {name}: {format_line(str(error))}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        said = format_line(str(error))
        print(f"quantgate {name}: {said}; finished work is kept, run `dvc repro` to go on", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"quantgate {name}: interrupted; finished work is kept, run `dvc repro` to go on", file=sys.stderr)
        sys.exit(130)
    finally:
        tell_cpu()
