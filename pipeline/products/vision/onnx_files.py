"""The .onnx file of a network: where it lies, and the session of ONNX Runtime that runs it. Free of torch.

A checkpoint is then a folder with one such file, the files of its external data, and config.json where `postprocess`
needs one. ONNX Runtime alone says what a file holds: it is loaded to be checked, on the provider that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, SettingsError
from pipeline.products.vision.settings import VisionStep
from pipeline.running.weight_files import INDEX_FILE, WEIGHTS_FILE

FORMAT, ENGINE = "onnx", "onnxruntime"  # of a checkpoint's record, and of how it is run
PROVIDER = "CPUExecutionProvider"
ABSENT = "absent"  # in place of a version
HIDE_GPU = "expected no GPU, as .onnx files are run on the CPU alone, found one: run with CUDA_VISIBLE_DEVICES=-1"
_WANTED = "onnxruntime>=1.32,<1.33"  # as requirements.txt and pyproject.toml have it
_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_OUTPUTS = {*_DTYPES, "tensor(double)", "tensor(bool)", *(f"tensor(int{n})" for n in (8, 16, 32, 64)), "tensor(uint8)"}
_AXES = ("images", "channels", "rows", "columns")


@dataclass(frozen=True)
class OnnxInput:
    """The one input of a file; a side that is free is not a number."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    def format_shape(self) -> str:
        """Return the shape as text."""
        sides = [str(s) if isinstance(s, int) else axis for s, axis in zip(self.shape, _AXES, strict=True)]
        return f"({', '.join(sides)})"

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Say whether a batch of this shape fits."""
        return all(not isinstance(own, int) or own == side for own, side in zip(self.shape, shape, strict=True))


def find_onnx(folder: Path) -> Path | None:
    """Return the .onnx file of a checkpoint's folder; None where it has none: it holds the weights of a torch module.

    Raises:
        CheckpointError: it is the file itself, or holds several, or weights of a torch module beside it.
    """
    if folder.suffix == ".onnx" and folder.is_file():
        raise CheckpointError(
            f"{folder}: expected the folder of an .onnx file, got the file; move it with its external data into a "
            "folder of its own, and name that"
        )
    found = sorted(path for path in folder.glob("*.onnx") if path.is_file())
    if not found:
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{folder}: expected one .onnx file, found {', '.join(repr(path.name) for path in found)}; give each a "
            "folder of its own, with its external data"
        )
    if both := next((name for name in (WEIGHTS_FILE, INDEX_FILE) if (folder / name).is_file()), None):
        raise CheckpointError(
            f"{folder}: expected {both} or an .onnx file, found both, {found[0].name!r} too: one says torch runs it, "
            "the other ONNX Runtime; give each a folder of its own"
        )
    return found[0]


def is_onnx(folder: Path) -> bool:
    """Say whether a checkpoint's folder holds an .onnx file, whatever else is wrong with it."""
    return folder.suffix == ".onnx" or any(folder.glob("*.onnx"))


def read_version() -> str:
    """Return the version of ONNX Runtime, by whatever package it came."""
    try:
        import onnxruntime
    except ImportError:
        return ABSENT
    return str(onnxruntime.__version__)


def open_session(path: Path, *, num_threads: int, optimizes: bool = True) -> Any:
    """Return a session of ONNX Runtime, with its own defaults but for threads, which do not spin while they wait.

    Args:
        path: of the .onnx file.
        num_threads: that one operation uses.
        optimizes: the graph, as it is run; to look into a file does without.

    Raises:
        CheckpointError: ONNX Runtime is not installed, can't load the file, or would run it elsewhere.
    """
    if read_version() == ABSENT:
        raise CheckpointError(
            f"{path}: expected ONNX Runtime, which runs the file, found no onnxruntime; install {_WANTED!r}"
        )
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what goes wrong is raised, too
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=[PROVIDER])
    except Exception as error:  # of ONNX Runtime's own types, which derive from nothing else
        raise CheckpointError(
            f"{path}: ONNX Runtime {read_version()} can't load it ({path.stat().st_size} bytes): "
            f"{read_message(error)[:400]}; copy it again with the files of its external data, or export it for this "
            "version"
        ) from None
    if (used := session.get_providers()) != [PROVIDER]:
        raise CheckpointError(
            f"{path}: expected to run by {PROVIDER} alone, ONNX Runtime runs it by {', '.join(used)}: other kernels "
            f"than those that were asked for; install {_WANTED!r} in place of another build"
        )
    return session


def inspect_onnx(path: Path, *, batch_size: int) -> OnnxInput:
    """Return the input of a file that is run on so many pictures at once; nothing is run.

    Raises:
        CheckpointError: ONNX Runtime can't load or run it, or it takes or returns something else.
    """
    return read_input(path, open_session(path, num_threads=1, optimizes=False), batch_size=batch_size)


def read_growth(path: Path) -> int | None:
    """Return how many times as many rows a file's pictures have afterwards; None where a side is free."""
    session = open_session(path, num_threads=1, optimizes=False)
    given, made = (sides[0].shape[2:3] for sides in (session.get_inputs(), session.get_outputs()))
    is_fixed = all(isinstance(side, int) and side > 0 for side in (*given, *made)) and len(made) == 1
    return made[0] // given[0] if is_fixed else None


def read_input(path: Path, session: Any, *, batch_size: int) -> OnnxInput:
    """Return the input of a file that is run on so many pictures at once.

    Raises:
        CheckpointError: it takes anything but batches of pictures, or returns anything but tensors of numbers.
    """
    inputs = session.get_inputs()
    if len(inputs) != 1:
        names = ", ".join(repr(one.name) for one in inputs) or "none"
        raise CheckpointError(
            f"{path}: expected one input, the pictures, found {names}; export the file so that it takes pictures alone"
        )
    given = OnnxInput(inputs[0].name, _DTYPES.get(inputs[0].type, inputs[0].type), tuple(inputs[0].shape))
    if given.dtype not in _DTYPES.values():
        raise CheckpointError(
            f"{path}: input {given.name!r}: expected float32 or float16, got {given.dtype}; export it with one of them"
        )
    if len(given.shape) != len(_AXES):
        raise CheckpointError(
            f"{path}: input {given.name!r}: expected the axes {', '.join(_AXES)}, got {list(given.shape)}; export it so"
        )
    if isinstance(num := given.shape[0], int) and (num != 1 or batch_size != 1):
        raise CheckpointError(
            f"{path}: input {given.name!r}: expected any number of pictures, as serving.batch_size is {batch_size} and "
            f"a last batch is smaller, got {num}; export it with a free (dynamic) first axis"
            + (", or set serving.batch_size to 1" if num == 1 else "")
        )
    for output in session.get_outputs():
        if output.type not in _OUTPUTS:
            raise CheckpointError(
                f"{path}: output {output.name!r}: expected a tensor of numbers, got {output.type}; export it so"
            )
    return given


def refuse_steps(name: str, steps: Sequence[VisionStep]) -> None:
    """Refuse steps of a candidate that is an .onnx file: each changes a torch module, or how torch runs it.

    Raises:
        SettingsError: with the first of them.
    """
    for step in steps[:1]:
        raise SettingsError(
            f"candidates.{name}.steps.0: expected no step with an .onnx file, which ONNX Runtime runs as it is, got "
            f"{step.model_dump()['kind']}; remove it, and name the folder of a file that was exported or quantised so"
        )


def describe_session(session: Any) -> dict[str, Any]:
    """Return how a session runs, after its defaults, as JSON."""
    options = session.get_session_options()
    return {
        "providers": session.get_providers(),
        "graph_optimization_level": options.graph_optimization_level.name,
        "execution_mode": options.execution_mode.name,
        "intra_op_num_threads": options.intra_op_num_threads,
        "inter_op_num_threads": options.inter_op_num_threads,
    }


def read_message(error: Exception) -> str:
    """Return what ONNX Runtime says, in one line."""
    return " ".join(str(error).split())
