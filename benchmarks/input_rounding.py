"""What does it cost to round a layer's inputs to few bits, by the library and by the embedded engine's own operations?

    python -m benchmarks.input_rounding [--channels 256] [--tokens 64 512] [--device cpu] [--dtype float32]
        [--threads 1]

Prints a row of Markdown a scheme and number of tokens: microseconds of compressed-tensors' `forward_quantize` and of
`pipeline/products/text/serving/input_rounding.py`, the best of five rounds in turn, and whether both give the same.
Ends with 1 where they don't.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

from pipeline.products.text.serving.input_rounding import InputRounding, find_rounding

SCHEMES = ("W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4")
NUM_ROUNDS, NUM_CALLS = 5, 40


def build_layer(scheme: str, channels: int, **options: Any) -> Any:
    """Return a linear layer as one of a quantised checkpoint is once it is decompressed."""
    layer = torch.nn.Linear(channels, 128, bias=False, **options)
    initialize_module_for_quantization(layer, preset_name_to_scheme(scheme, ["Linear"]))
    for name, value in layer.named_parameters():
        if name.endswith("global_scale"):
            value.data.fill_(300.0)
    layer.quantization_status = QuantizationStatus.COMPRESSED
    return layer


def measure(calls: list[Callable[[], object]]) -> list[float]:
    """Return the microseconds of each call: the best of some rounds, in turn."""
    best = [float("inf")] * len(calls)
    for _ in range(NUM_ROUNDS):
        for i, call in enumerate(calls):
            call()
            wait()
            start = time.perf_counter()
            for _ in range(NUM_CALLS):
                call()
            wait()
            best[i] = min(best[i], (time.perf_counter() - start) / NUM_CALLS * 1e6)
    return best


def wait() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.inference_mode()
def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    options, is_equal = {"device": asked.device, "dtype": getattr(torch, asked.dtype)}, True
    print("| scheme | tokens | library, µs | own, µs | ratio | values |\n|---|---:|---:|---:|---:|---|")
    for scheme in SCHEMES:
        layer = build_layer(scheme, asked.channels, **options)
        rounding = find_rounding(layer)
        if not isinstance(rounding, InputRounding):
            sys.exit(f"{scheme}: expected values equal to the library's, found others")
        for num in asked.tokens:
            x = torch.randn(1, num, asked.channels, **options)
            # a view each time: the same input is rounded once
            library, own = measure([lambda r=rounding, x=x: r.otherwise(x), lambda r=rounding, x=x: r(x.view_as(x))])
            same = torch.equal(rounding(x), rounding.otherwise(x))
            is_equal &= same
            said = "equal" if same else "DIFFERENT"
            print(f"| {scheme} | {num} | {library:.0f} | {own:.0f} | {own / library:.2f} | {said} |")
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
