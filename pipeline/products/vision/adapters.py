"""The user's own code for a network: a Python file with three functions.

    build(config)                  the contents of config.json -> an untrained torch.nn.Module; where all checkpoints
                                   are .onnx files it may be left out
    preprocess(pixels)             uint8 (images, rows, columns, 3), RGB -> the module's input, float32
                                   (images, channels, rows, columns)
    postprocess(outputs, config)   what the module returns, on the CPU and with fractions in float32 -> of a detector
                                   a list an image of COCO results, dictionaries with `bbox` [left, top, width,
                                   height] in pixels, `score` and `category_id`; of an upscaler uint8 (images, rows,
                                   columns, 3)

With a parameter `size`, `postprocess` also gets the rows and columns of the pictures that `preprocess` was given, as an
.onnx file of fixed sides needs: its boxes are scaled back there.

The file is code of the project that runs it, never of a checkpoint that was downloaded, and weights are never
unpickled. What goes wrong in it is one line with its file and line; a device without memory is none of its errors. Not
covered: a change in a file that it imports, which no digest sees.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import CheckpointError, EngineError
from pipeline.products.vision.onnx_files import is_onnx
from pipeline.records.digests import digest_bytes, digest_text
from pipeline.running.gpu_failures import describe_gpu_failure

FUNCTIONS = ("build", "preprocess", "postprocess")
_WITHOUT_MODULE = FUNCTIONS[1:]
_SIZE = "size"  # parameter of postprocess


@dataclass(frozen=True)
class Adapter:
    """The three functions of an adapter, whether the last one takes the size of the pictures, and the file's digest."""

    path: Path
    digest: str
    build: Callable[[dict[str, Any]], Any]
    preprocess: Callable[[Any], Any]
    postprocess: Callable[..., Any]
    takes_size: bool = False


def list_functions(*folders: Path) -> tuple[str, ...]:
    """Return the functions that an adapter of these checkpoints has: no module is built of an .onnx file."""
    return _WITHOUT_MODULE if all(map(is_onnx, folders)) else FUNCTIONS


def load_adapter(path: Path, functions: Sequence[str] = FUNCTIONS) -> Adapter:
    """Run an adapter's file; what is digested is what runs, as no bytecode of another time is read.

    Args:
        path: of the file.
        functions: that it must have.

    Raises:
        CheckpointError: no file, it can't be imported, or a function is missing.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: expected the adapter, a Python file with {', '.join(functions)}, found none")
    source = path.read_bytes()
    module = ModuleType(f"quantgate_adapter_{digest_text(str(path.resolve()))[:12]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"{path}: the adapter can't be imported: {format_adapter_error(error, path)}") from None
    missing = [function for function in functions if not callable(getattr(module, function, None))]
    if missing:
        raise CheckpointError(
            f"{path}: expected the functions {', '.join(functions)}, found no {missing[0]}; see "
            "docs of `pipeline/products/vision/adapters.py`"
        )
    guarded = {name: _guard(path, name, getattr(module, name, None)) for name in FUNCTIONS}
    return Adapter(path=path, digest=digest_bytes(source), takes_size=_takes_size(module.postprocess), **guarded)


def _takes_size(function: Callable[..., Any]) -> bool:
    try:
        return _SIZE in inspect.signature(function).parameters
    except ValueError:  # compiled code may not tell its parameters
        return False


def format_adapter_error(error: BaseException, path: Path) -> str:
    """Return an error as text; where it came through the adapter, with the number of its line there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    message: object = error
    if isinstance(error, SyntaxError) and error.filename == str(path):
        message, lines = error.msg, [error.lineno]
    line = lines[-1] if lines else None
    text = " ".join(str(message).split())[:300] or "without a message"
    return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")


def _guard(path: Path, name: str, function: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (Exception, SystemExit) as error:
            # not the adapter's fault; of these two types the pool of workers says what failed
            if isinstance(error, (RuntimeError, MemoryError)) and describe_gpu_failure(error, remedy=""):
                raise
            raise EngineError(
                f"{path}: {name}() failed: {format_adapter_error(error, path)}; "
                "correct the adapter, or what it is given"
            ) from None

    return call
