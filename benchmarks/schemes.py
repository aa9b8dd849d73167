"""What does each scheme of numbers cost a checkpoint? Bytes a weight, loss on held-out texts, seconds to make.

Quantises a checkpoint by each preset of `kind: quantize`, rounding to nearest, and a cache of 8-bit floats with
FP8_DYNAMIC and alone, with all checks of the step. It scores documents with plain transformers: negative
log-likelihood in nats a token. FP4 and MXFP8 are scored in bfloat16, beside the reference in bfloat16; the others in
float32. The first row has the library's import in its seconds. One look without an interval: the gate's evals decide.

    python -m benchmarks.schemes [--checkpoint models/agent] [--documents evalsets/prose] [--num-documents 40]
        [--tokens 200] [--schemes NAME ...]

Not covered: what kernels for these numbers do. transformers unpacks the weights and rounds inputs in the wider type.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.texts import load_calibration_texts
from pipeline.evalsets.cards import load_evalset
from pipeline.products.text.checkpoints import layer_shapes
from pipeline.products.text.model_loading import load_model, load_tokenizer
from pipeline.products.text.optimize.quantize import quantize
from pipeline.products.text.schemes import PRESETS
from pipeline.products.text.step_settings import Calibration, KvCache, QuantizeStep

CALIBRATION = Calibration(sources=["prose"], num_samples=64, max_tokens=256, length_exponent=0.0)
CACHES = {f"{scheme}kv_{way}": way for scheme in ("FP8_DYNAMIC+", "") for way in ("tensor", "attn_head", "token")}
NAMES = (*PRESETS, *CACHES)
WRITERS = ["re:.*o_proj", "re:.*down_proj"]  # layers that write to the residual stream
MIXES: dict[str, dict[str, Any]] = {  # `make` alone knows them
    "W4A16, W8A16 by rules": {"scheme": "W4A16", "rules": [{"layers": WRITERS, "scheme": "W8A16"}]},
    "W8A8, some layers left": {"scheme": "W8A8", "exclude": ["lm_head", *WRITERS]},
}


def main() -> None:
    """Print a table, a row a scheme."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("models/agent"))
    parser.add_argument("--documents", type=Path, default=Path("evalsets/prose"))
    parser.add_argument("--num-documents", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=200, help="after which a document is cut")
    parser.add_argument("--schemes", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.checkpoint)
    cases = load_evalset(arguments.documents).cases[: arguments.num_documents]
    documents = [tokenizer(case.text, add_special_tokens=False)["input_ids"][: arguments.tokens] for case in cases]
    reference = {dtype: score(arguments.checkpoint, documents, dtype) for dtype in ("float32", "bfloat16")}
    print(f"reference: {reference['float32']:.4f} nats a token in float32, {reference['bfloat16']:.4f} in bfloat16")
    print("| scheme | bytes a weight | loss, nats a token | CPU s to make and check |\n|---|---:|---:|---:|")
    for name in arguments.schemes:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made"
            start = time.process_time()
            num_bytes, num_weights = make(arguments.checkpoint, made, name)
            size = f"{num_bytes / num_weights:.3f}" if num_weights else "as they are"
            seconds = time.process_time() - start
            dtype = "bfloat16" if name in PRESETS and PRESETS[name].weights.scale_dtype else "float32"
            loss = score(made, documents, dtype) - reference[dtype]
        print(f"| {name} | {size} | {loss:+.4f} | {seconds:.1f} |", flush=True)


def make(source: Path, target: Path, name: str) -> tuple[int, int]:
    """Quantise a checkpoint; return the bytes of its quantised layers, and how many weights they have."""
    scheme = None if name.startswith("kv_") else name.partition("+")[0]
    mix = MIXES.get(name) or {"scheme": scheme}
    cache = KvCache.model_validate({"dtype": "fp8", "strategy": CACHES[name]}) if name in CACHES else None
    is_stored = scheme in PRESETS and PRESETS[scheme].needs_calibration
    needs_texts = is_stored or (cache is not None and not cache.resolve().dynamic)
    calibration = CALIBRATION if needs_texts else None
    step = QuantizeStep.model_validate({"kind": "quantize", "kv_cache": cache, "calibration": calibration, **mix})
    result = quantize(source, target, step=step, calibration_set=load_calibration_texts())
    asked = [layer for layer in result.coverage if layer.asked and not layer.format.startswith("kv-")]
    shapes = layer_shapes(source)
    return sum(layer.num_bytes for layer in asked), sum(math.prod(shapes[layer.layer]) for layer in asked)


def score(folder: Path, documents: Sequence[Sequence[int]], dtype: str) -> float:
    """Return the negative log-likelihood of documents, in nats a token."""
    import torch

    model, total, count = load_model(folder, dtype=dtype), 0.0, 0
    with torch.inference_mode():
        for ids in documents:
            tokens = torch.tensor([ids])
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
            count += len(ids) - 1
    return total / count


if __name__ == "__main__":
    main()
