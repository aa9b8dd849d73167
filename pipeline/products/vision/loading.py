"""Load a network as a serving config says and run pictures through it.

A folder holds config.json and model.safetensors; the adapter builds the module, and every weight must fit. On a
machine with a GPU it runs there. A folder with an .onnx file is run by ONNX Runtime, in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.errors import CheckpointError, EngineError, QuantgateError
from pipeline.numerics.tiling import blend_tiles
from pipeline.products.vision.adapters import Adapter, format_adapter_error
from pipeline.products.vision.conv_policy import apply_policy
from pipeline.products.vision.files import read_config
from pipeline.products.vision.int8_conv import pack_layers, set_up_layers
from pipeline.products.vision.onnx_files import ENGINE, find_onnx
from pipeline.products.vision.onnx_module import OnnxModule
from pipeline.records.serving import NetworkServing
from pipeline.running.gpu_failures import describe_gpu_failure
from pipeline.running.weight_files import iterate_weights


class Network:
    """A module as one serving config runs it."""

    def __init__(self, module: torch.nn.Module, config: dict[str, Any], adapter: Adapter, serving: NetworkServing):
        """Set a float32 module up; it is changed in place."""
        self.config, self.adapter, self.serving = config, adapter, serving
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = getattr(torch, serving.dtype)
        self._format = torch.channels_last if serving.channels_last else torch.contiguous_format
        apply_policy(module, serving.conv_policy)
        stored = torch.float32 if serving.autocast else self._dtype
        self.module = module.to(self.device, stored).to(memory_format=self._format)
        pack_layers(self.module)
        self.call: Callable[[torch.Tensor], Any] = self.module
        if serving.compile_mode is not None:
            self.call = torch.compile(self.module, mode=serving.compile_mode, dynamic=serving.compile_dynamic)

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the module's input in its format.

        Args:
            pixels: uint8 (images, rows, columns, 3).

        Raises:
            EngineError: the adapter failed, or returned no batch of as many images, or one of
                other sides that is to be cut into tiles.
            CheckpointError: an .onnx file takes other sides.
        """
        x = self.adapter.preprocess(pixels.to(self.device))
        if not isinstance(x, torch.Tensor) or x.ndim != 4 or len(x) != len(pixels):
            came = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise EngineError(
                f"{self.adapter.path}: preprocess() returned {came!r}, expected a tensor of shape "
                f"({len(pixels)}, channels, rows, columns)"
            )
        # the pictures' own sides say where tiles meet, and there seams are looked for
        if self.serving.tiling and x.shape[2:] != pixels.shape[1:3]:
            raise EngineError(
                f"{self.adapter.path}: preprocess() made {tuple(x.shape[2:])} of pictures of "
                f"{tuple(pixels.shape[1:3])}, expected the same rows and columns, as tiles are cut of them; pad or "
                "rearrange pixels in the module"
            )
        if isinstance(self.module, OnnxModule):
            self.module.check(x)
        return x.to(torch.float32 if self.serving.autocast else self._dtype).contiguous(memory_format=self._format)

    @torch.inference_mode()
    def run(self, x: torch.Tensor) -> Any:
        """Run a prepared input; return what the module returns.

        Raises:
            EngineError: the module failed.
        """
        tiling = self.serving.tiling
        try:
            if tiling is None:
                return self._forward(x)
            return blend_tiles(self._forward, x, tile=tiling.tile, overlap=tiling.overlap_pixels, window=tiling.window)
        except QuantgateError as error:
            raise EngineError(f"{self.adapter.path}: {error}") from None
        except Exception as error:
            if describe_gpu_failure(error, remedy=""):  # not of this input
                raise
            raise EngineError(
                f"{self.adapter.path}: the module failed on an input of shape {tuple(x.shape)}: "
                f"{format_adapter_error(error, self.adapter.path)}"
            ) from None

    def finish(self, outputs: Any, size: tuple[int, int]) -> Any:
        """Return the adapter's results from what the module returned of pictures of so many rows and columns."""
        more = {"size": size} if self.adapter.takes_size else {}
        return self.adapter.postprocess(to_float(outputs), self.config, **more)

    def _forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=self.serving.autocast):
            return self.call(x)


def load_network(folder: Path, adapter: Adapter, serving: NetworkServing) -> Network:
    """Build a network, load its weights, and set it up as a serving config says.

    Args:
        folder: with config.json and model.safetensors, or with an .onnx file.
        adapter: builds it, unless ONNX Runtime runs it.
        serving: how it is run.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are not those of the module.
    """
    config = read_config(folder)
    if path := find_onnx(folder):
        served = OnnxModule(path, num_threads=serving.num_threads, batch_size=serving.batch_size)
        return Network(served, config, adapter, serving.model_copy(update={"engine": ENGINE}))
    module = adapter.build(config)
    if not isinstance(module, torch.nn.Module):
        raise CheckpointError(f"{adapter.path}: build() returned {type(module).__name__!r}, expected a torch.nn.Module")
    try:
        tensors = dict(iterate_weights(folder))
        set_up_layers(module, tensors)
        module.load_state_dict(tensors)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: expected the weights of what {adapter.path} builds: {' '.join(str(error).split())[:300]}"
        ) from None
    as_torch = serving.model_copy(update={"engine": "torch"})
    return Network(module.float().eval().requires_grad_(False), config, adapter, as_torch)


def to_float(outputs: Any) -> Any:
    """Return a module's outputs, a tensor or tensors in lists and dictionaries, on the CPU; fractions in float32."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return (leaf.float() if leaf.is_floating_point() else leaf).cpu()  # labels and masks stay what they are

    return tree_map(convert, outputs)


def list_tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's outputs."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
