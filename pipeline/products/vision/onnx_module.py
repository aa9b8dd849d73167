"""An .onnx file as a torch module, so that it is run, timed and judged as any other.

It takes a batch and returns the file's outputs: a tensor where there is one, else tensors by their names in the file.
Nothing is copied but to float16, where the file takes that. Shapes may differ from batch to batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.errors import CheckpointError
from pipeline.products.vision.onnx_files import HIDE_GPU, describe_session, open_session, read_input, read_message


class OnnxModule(torch.nn.Module):
    """A session of ONNX Runtime."""

    def __init__(self, path: Path, *, num_threads: int, batch_size: int):
        """Load a file.

        Args:
            path: of the .onnx file.
            num_threads: that run it.
            batch_size: most pictures of a batch.

        Raises:
            CheckpointError: it can't be loaded, takes something else than pictures, or there is a GPU.
        """
        super().__init__()
        if torch.cuda.is_available():  # all else would run there
            raise CheckpointError(f"{path}: {HIDE_GPU}")
        self._path, self._session = path, open_session(path, num_threads=num_threads)
        self._input = read_input(path, self._session, batch_size=batch_size)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._dtype = getattr(torch, self._input.dtype)
        self.facts = describe_session(self._session)

    def check(self, x: torch.Tensor) -> None:
        """Refuse a batch of other sides than the file takes.

        Raises:
            CheckpointError: with both.
        """
        if not self._input.takes(tuple(x.shape)):
            raise CheckpointError(
                f"{self._path}: input {self._input.name!r}: expected {self._input.format_shape()}, got "
                f"{tuple(x.shape)}; make pictures so in preprocess(), or export it with free (dynamic) sides"
            )

    def forward(self, x: torch.Tensor) -> Any:
        """Run a batch of float32 (images, channels, rows, columns).

        Raises:
            CheckpointError: an operation failed on it.
        """
        given = x.to(self._dtype).numpy()
        try:
            arrays = self._session.run(self._outputs, {self._input.name: given})
        except Exception as error:  # of ONNX Runtime's own types, which derive from nothing else
            raise CheckpointError(
                f"{self._path}: ONNX Runtime failed on an input of shape {tuple(x.shape)}: "
                f"{read_message(error)[:400]}; where one picture alone runs, export it for any number"
            ) from None
        tensors = [torch.from_numpy(array) for array in arrays]
        return tensors[0] if len(tensors) == 1 else dict(zip(self._outputs, tensors, strict=True))
