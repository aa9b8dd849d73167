"""What multiplied the quantised layers of a denoiser while it ran: their weights made floats again, or INT8 numbers.

Weights alone in 8 bits become floats for each product: no kernel is claimed, and nothing is emulated. Where inputs are
rounded too, torchao multiplies integers by `aten::_int_mm`, which is oneDNN's on a CPU; where it finds no such kernel
for a shape, it multiplies otherwise, which emulates INT8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipeline.running.quiet import silence_profiler

_INTEGER_PRODUCT = "aten::_int_mm"


def count_products(module: nn.Module, run: Callable[[], Any]) -> dict[str, Any] | None:
    """Return how often quantised layers were called in one run, and how often INT8 numbers were multiplied.

    None for a module without such layers.
    """
    weights = {name: part.weight for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    layers = [name for name, weight in weights.items() if hasattr(weight, "qdata")]
    if not layers:
        return None
    calls: Counter[str] = Counter()
    silence_profiler()
    with ExitStack() as stack:
        for name in layers:
            hook = module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
            stack.callback(hook.remove)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            run()
    seen = {event.key: event.count for event in profiler.key_averages()}
    return {
        "num_layers": len(layers),
        "num_calls": calls.total(),
        "num_integer_products": seen.get(_INTEGER_PRODUCT, 0),
        "rounds_inputs": any(getattr(weights[name], "act_quant_kwargs", None) is not None for name in layers),
    }
