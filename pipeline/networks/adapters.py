"""The user's own code for a network: a Python file with three functions.

    build(config)                  the contents of config.json -> an untrained torch.nn.Module
    preprocess(pixels)             uint8 (images, rows, columns, 3), RGB -> the module's input, float32
                                   (images, channels, rows, columns)
    postprocess(outputs, config)   what the module returns, in float32 -> of a detector a list an image of COCO
                                   results, dictionaries with `bbox` [left, top, width, height] in pixels, `score` and
                                   `category_id`; of an upscaler uint8 (images, rows, columns, 3)

The file is imported from where it lies: it is code of the project that runs it, never of a checkpoint that was
downloaded, and weights are never unpickled. What goes wrong in it is one line with its file and line.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.digests import digest_file, digest_text
from pipeline.errors import CheckpointError, EngineError

FUNCTIONS = ("build", "preprocess", "postprocess")


@dataclass(frozen=True)
class Adapter:
    """The three functions of an adapter, and the digest of its file."""

    path: Path
    digest: str
    build: Callable[[dict[str, Any]], Any]
    preprocess: Callable[[Any], Any]
    postprocess: Callable[[Any, dict[str, Any]], Any]


def load_adapter(path: Path) -> Adapter:
    """Import an adapter.

    Raises:
        CheckpointError: no file, it can't be imported, or a function is missing.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: expected the adapter, a Python file with {', '.join(FUNCTIONS)}, found none")
    name = f"quantgate_adapter_{digest_text(str(path.resolve()))[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CheckpointError(f"{path}: expected the adapter, a Python file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CheckpointError(f"{path}: the adapter can't be imported: {tell_error(error, path)}") from None
    missing = [function for function in FUNCTIONS if not callable(getattr(module, function, None))]
    if missing:
        raise CheckpointError(f"{path}: expected the functions {', '.join(FUNCTIONS)}, found no {missing[0]}; see "
                              "docs of `pipeline/networks/adapters.py`")  # fmt: skip
    functions = {name: _guard(path, name, getattr(module, name)) for name in FUNCTIONS}
    return Adapter(path=path, digest=digest_file(path), **functions)


def tell_error(error: BaseException, path: Path) -> str:
    """Say what an error was and, where it came through the adapter, on which of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    said = " ".join(str(error).split())[:300] or "without a message"
    return f"{type(error).__name__}: {said}" + (f" (line {line})" if line else "")


def _guard(path: Path, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise EngineError(f"{path}: {name}() failed: {tell_error(error, path)}; correct the adapter, or what it is "
                              "given") from None  # fmt: skip

    return call
