"""The only importer of llm-compressor: runs one of its recipes on a model and reports each layer.

It neutralises five things of the library. One line a layer replaces its log and progress bars. Its log level
METRIC sits above WARNING. Pinned memory crashes AWQ on machines without an accelerator. On a GPU it rounds as many
layers together as the free memory holds, so that results would depend on it. It rounds norms that are stored as a
distance from one, which no recipe asks for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")  # it logs while it is being imported

import llmcompressor.modifiers.gptq.base as gptq_module
import torch
from compressed_tensors.distributed import is_distributed
from compressed_tensors.offload import update_offload_parameter
from llmcompressor import oneshot
from llmcompressor.core import State, reset_session
from llmcompressor.modeling.offset_norm import NormCalibrationModule, norm_calibration_context
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.smoothquant.base import MINIMUM_SMOOTHING_SCALE
from llmcompressor.pipelines.cache import IntermediatesCache
from loguru import logger
from torch.fx._symbolic_trace import _wrapped_fns_to_patch

from pipeline.errors import QuantizationError
from pipeline.products.text.model_loading import hide_progress_bars
from pipeline.products.text.optimize.float32_products import Float32Products, list_slow_dtypes
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.schemes import NumberFormat, Scheme
from pipeline.products.text.step_settings import QuantizeStep

_LIBRARY = sys.modules[oneshot.__module__]  # whose function hides the module of its name
MAX_SHARD = "1GB"
_PROBE_TOKENS = 8  # that show whether moving scales changes an answer
MAX_MOVED = 0.05  # of the logits' deviation: float16 loses digits of small values, a wrong move many times that


class Move(NamedTuple):
    """Scales that go from one module to the layers that read it."""

    name: str  # of the module that is divided
    divided: Any
    layers: Sequence[Any]  # that are multiplied


ALIKE_AT_ONCE = 4  # layers of one shape that GPTQ rounds together on a GPU: a block has at most q, k, v and o


def run_recipe(model: Any, tokenizer: Any, recipe: list[Any], *, samples: Sequence[Sequence[int]]) -> None:
    """Quantise `model` in place, with calibration samples in the order and at the length given; there may be none."""
    batches = [
        {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        for ids in samples
    ]
    data: dict[str, Any] = {}
    if batches:
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        data = {"dataset": loader, "num_calibration_samples": len(batches)}
    with (
        quiet_library(),
        Float32Products(list_slow_dtypes()),
        patch.object(_LIBRARY, "norm_calibration_context", _keep_norms),
    ):
        oneshot(model=model, tokenizer=tokenizer, recipe=recipe, **data)


@contextlib.contextmanager
def _keep_norms(model: Any) -> Iterator[None]:
    """Have norms that are stored as a distance from one changed as the library does, and those that nothing moved not.

    It adds one in the type of the weights and takes it off again, which rounds each to that type's steps at one.
    """
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim == 1}
    with norm_calibration_context(model):
        norms = {name: m for name, m in model.named_modules() if isinstance(m, NormCalibrationModule)}
        added = {name: norm.weight.detach().clone() for name, norm in norms.items()}
        yield
        kept = [name for name, norm in norms.items() if norm.weight.equal(added[name])]
    for name in kept:
        model.get_submodule(name).weight.data = before[f"{name}.weight"]


def save_compressed(model: Any, folder: Any) -> None:
    """Write the quantised model as packed compressed-tensors, in files that several cores can digest at once."""
    with quiet_library():
        model.save_pretrained(folder, save_compressed=True, max_shard_size=MAX_SHARD)


def build_recipe(step: QuantizeStep, plan: LayerPlan, log: StepLog, *, model: Any) -> list[Any]:
    """Build the recipe of a step; losses, fallbacks, and what inputs and caches were seen go to `log`."""
    names = {module: name for name, module in model.named_modules()}
    recipe = [_build_awq(step, plan, log)] if step.algorithm == "awq" else []
    if step.smoothing_strength is not None:
        recipe.append(_build_smoothing(step.smoothing_strength, log, names))
    if step.algorithm == "gptq":
        return [*recipe, _build_gptq(step, plan, log, names)]
    rounding = _watch(QuantizationModifier, plan, log)(**_build_groups(plan))
    if step.calibration is None:
        rounding.requires_calibration_data = False  # the library asks for texts wherever there is a cache
    return [*recipe, rounding]


def _watch(modifier: Any, plan: LayerPlan, log: StepLog) -> Any:
    """Return a class of modifier that notes the largest of each input and cache that gets a stored scale."""

    class Watching(modifier):
        def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
            super().on_calibration_start(state, event, **kwargs)
            for name, module in state.model.named_modules():
                if name in plan.asked and plan.schemes[name].needs_calibration:
                    self.register_hook(module, partial(note_input, f"{name}.input"), "forward_pre")
                if plan.cache is not None and not plan.cache.dynamic and name in plan.cached:
                    self.register_hook(module, partial(note_cache, f"{name}.k"), "key")
                    self.register_hook(module, partial(note_cache, f"{name}.v"), "value")

        def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
            super().on_calibration_end(state, event, **kwargs)
            self.remove_hooks()

    def note_input(name: str, _: Any, arguments: tuple[Any, ...]) -> None:
        log.record_range(name, arguments[0].detach().abs().amax())

    def note_cache(name: str, _: Any, states: Any) -> None:
        log.record_range(name, states.detach().abs().amax(dim=(0, 2, 3)))  # (batch, heads, tokens, head_dim)

    return Watching


def _build_gptq(step: QuantizeStep, plan: LayerPlan, log: StepLog, names: dict[Any, str]) -> Any:

    class ReportingLogger(gptq_module.CompressionLogger):
        """Passes a layer's loss on instead of printing it."""

        def set_results(self, name: str | None = None, loss: float | None = None) -> None:
            if loss is not None:
                log.record_loss([names[self.module]], loss)

        def __exit__(self, *exception: object) -> None:
            return None

    class ReportingGptq(GPTQModifier):
        """Names the layers whose Hessian could not be inverted."""

        def compress_modules(self) -> None:
            with patch.object(gptq_module, "CompressionLogger", ReportingLogger):
                super().compress_modules()
            # on a CPU ranks share the weights in memory, and the library goes on while others still write them
            if is_distributed():
                torch.distributed.barrier()

        def _log_rtn_fallback_summary(self) -> None:
            for name in self._rtn_fallback_module_names:
                log.record_fallback(name, "rounded to nearest: singular Hessian; raise damping_fraction")

    return _watch(ReportingGptq, plan, log)(
        **_build_groups(plan),
        dampening_frac=step.damping_fraction,
        actorder="static" if step.activation_order else None,
        batched_quantization=ALIKE_AT_ONCE if torch.cuda.is_available() else None,
    )


def _build_awq(step: QuantizeStep, plan: LayerPlan, log: StepLog) -> Any:
    # the loss of a scale search counts for each layer it scales

    class ReportingAwq(AWQModifier):
        """Searches scales only where they help, and reports each search."""

        def _set_resolved_mappings(self, model: Any) -> None:
            super()._set_resolved_mappings(model)
            # a search over layers that stay as they are divides by zero in the library
            useful = [m for m in self._resolved_mappings if all(name in plan.asked for name in m.balance_names)]
            self._resolved_mappings: list[Any] = useful
            log.total = len(useful)
            _check_moves(model, [Move(m.smooth_name, m.smooth_layer, m.balance_layers) for m in useful])

        def _compute_best_scale(self, mapping: Any, *args: Any) -> Any:
            scales = super()._compute_best_scale(mapping, *args)
            log.record_loss(mapping.balance_names, self._error_metrics[-1]["best_error"])
            log.record_scales(mapping.balance_names, scales, smoothed=mapping.smooth_name)
            return scales

    return ReportingAwq(duo_scaling=True, n_grid=step.num_grid_points)


def _build_smoothing(strength: float, log: StepLog, names: dict[Any, str]) -> Any:
    class ReportingSmoothQuant(SmoothQuantModifier):
        """Reports the scales that it moves, and refuses a model without any to move."""

        def on_initialize(self, state: State, **kwargs: Any) -> bool:
            is_ready = super().on_initialize(state, **kwargs)
            if not self.resolved_mappings_:
                raise QuantizationError(
                    f"smoothing_strength: expected norms that llm-compressor knows before linear layers, found none in "
                    f"{type(state.model).__name__}: nothing would be smoothed; remove it"
                )
            moves = [Move(m.smooth_name, m.smooth_layer, m.balance_layers) for m in self.resolved_mappings_]
            _check_moves(state.model, moves)
            return is_ready

        def _calculate_smoothing_scales(self, balance_layers: list[Any], activation_scales: Any) -> Any:
            scales = super()._calculate_smoothing_scales(balance_layers, activation_scales)
            scales = scales.clamp(min=MINIMUM_SMOOTHING_SCALE)
            smoothed = next(m.smooth_name for m in self.resolved_mappings_ or () if m.balance_layers is balance_layers)
            log.record_scales([names[layer] for layer in balance_layers], scales, smoothed=smoothed)
            return scales

    return ReportingSmoothQuant(smoothing_strength=strength)


def _check_moves(model: Any, moves: Sequence[Move]) -> None:
    """Refuse scales that would be divided out where not everything behind is multiplied: answers would change.

    The library goes by names, and for a model that it does not know by Llama's. Gemma 2 has a norm of such a name
    before a residual sum, and Phi's norm feeds layers of other names as well. So the move is tried with powers of two,
    which change no product's digits: the logits of a probe must stay.

    Args:
        model: before anything is moved; it is left as it is.
        moves: what is divided, and the layers that are multiplied.

    Raises:
        QuantizationError: names the first kind of move that changes them.
    """
    if not moves or is_distributed():  # of several ranks weights are elsewhere
        return
    before = _probe(model)
    kinds: dict[str, list[Move]] = {}
    for move in moves:
        kinds.setdefault(re.sub(r"\d+", "*", move.name), []).append(move)
    if _stays(model, moves, before):
        return
    wrong = next((same for same in kinds.values() if not _stays(model, same, before)), list(moves))[0]
    layers = ", ".join(name for name, module in model.named_modules() if any(module is one for one in wrong.layers))
    raise QuantizationError(
        f"llm-compressor would move scales from {wrong.name} to {layers}, which changes the answers of "
        f"{type(model).__name__}: these layers are not what it feeds, or not all; use algorithm gptq or rtn, without "
        "smoothing_strength"
    )


def _probe(model: Any) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.arange(_PROBE_TOKENS, device=model.device)[None]
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
    return logits


def _stays(model: Any, moves: Sequence[Move], before: torch.Tensor) -> bool:
    """Say whether a model answers as before while powers of two are moved.

    Of linear layers what they read and write is scaled: that is the same, and most weights of a large model would be
    written four times. A norm's weights are, as it may not multiply by them alone.
    """
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for move in moves:
            num_channels = move.layers[0].weight.shape[1]
            factors = torch.tensor([2.0, 1.0]).repeat(num_channels)[:num_channels]
            if isinstance(move.divided, torch.nn.Linear):
                stack.callback(move.divided.register_forward_hook(partial(_divide_output, factors)).remove)
            else:
                _divide_weights(move.divided, factors, stack)
            for layer in move.layers:
                stack.callback(layer.register_forward_pre_hook(partial(_multiply_input, factors)).remove)
        off = (_probe(model) - before).abs().max()
    return bool(off <= MAX_MOVED * before.std())


def _divide_output(factors: torch.Tensor, _layer: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    divided = output.clone()
    divided[..., -len(factors) :] /= factors.to(output)  # of a fused layer those that the others read
    return divided


def _multiply_input(factors: torch.Tensor, _layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0] * factors.to(inputs[0]), *inputs[1:])


def _divide_weights(norm: Any, factors: torch.Tensor, stack: contextlib.ExitStack) -> None:
    """Divide a module's weights and biases, and have them put back as they were when the stack is left.

    On a GPU the library keeps weights on the host. A look at one makes a copy, and what is written there is lost.
    """
    for part in ("weight", "bias"):
        weight = getattr(norm, part, None)
        if weight is not None:
            stack.callback(update_offload_parameter, norm, part, weight.data.clone())
            update_offload_parameter(norm, part, weight.data / factors.to(weight))


def forget_model() -> None:
    """Free the last model once nobody else holds it: the library's session keeps it, and so does torch's tracer."""
    with quiet_library():
        reset_session()
    _forget_traces()
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's: it keeps for itself what was freed in pieces of megabytes
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # else what was freed still counts as taken on the card


def _forget_traces() -> None:
    # the library traces layers in namespaces of its own, which hold them; torch means this list for modules' namespaces
    for key, namespace in list(_wrapped_fns_to_patch.items()):
        if getattr(sys.modules.get(namespace.get("__name__", "")), "__dict__", None) is not namespace:
            del _wrapped_fns_to_patch[key]


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """Keep warnings, drop progress bars and everything below a warning."""
    logger.remove()
    logger.add(sys.stderr, level="WARNING", format="llm-compressor: {message}", filter=_is_news)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hide_progress_bars())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        stack.enter_context(patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"}))
        if not torch.accelerator.is_available():
            stack.enter_context(patch.object(IntermediatesCache, "pin_memory", lambda *_: None))
        yield


def _is_news(record: Any) -> bool:
    # what these two functions warn of is in the environment record, and in the candidate's fallbacks
    known = record["function"] in ("get_main_device", "_set_resolved_mappings")
    return not known and record["level"].name in ("WARNING", "ERROR", "CRITICAL")


def _build_groups(plan: LayerPlan) -> dict[str, Any]:
    """Return the schemes and their layers as a modifier takes them: by the layers' names where there are several."""
    groups = {
        f"group_{i}": {"targets": ["Linear"] if len(plan.groups) == 1 else sorted(layers), **_as_arguments(scheme)}
        for i, (scheme, layers) in enumerate(plan.groups)
    }
    cache = {"kv_cache_scheme": _as_numbers(plan.cache) | _choose_observer(plan.cache)} if plan.cache else {}
    return {"config_groups": groups, "ignore": sorted(plan.excluded), **cache}


def _as_arguments(scheme: Scheme) -> dict[str, Any]:
    """Return a scheme in the library's own arguments; what it decides by itself is left to it."""
    arguments = {"weights": _as_numbers(scheme.weights)}
    if scheme.input_activations is not None:
        arguments["input_activations"] = _as_numbers(scheme.input_activations) | _choose_observer(
            scheme.input_activations
        )
    return arguments


def _as_numbers(numbers: NumberFormat) -> dict[str, Any]:
    arguments = numbers.model_dump(exclude_none=True)
    if "scale_dtype" in arguments:
        arguments["scale_dtype"] = getattr(torch, arguments["scale_dtype"])
    return arguments


def _choose_observer(numbers: NumberFormat) -> dict[str, Any]:
    """Return how stored scales are chosen: by the largest of all samples, where the library's average forgets some."""
    return {} if numbers.dynamic is True else {"observer": "static_minmax"}
