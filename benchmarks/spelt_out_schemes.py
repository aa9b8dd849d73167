"""Which schemes, spelt out, does the library make? Those that settings allow must all be made and loaded.

Writes a tiny random Llama and quantises it by every combination of the fields of weights, and of four kinds of weights
with every combination of the fields of inputs, rounding to nearest. What the settings refuse is counted. The rest must
pass all checks of the step, which end with the logits of what was stored. Two minutes on a CPU.

    python -m benchmarks.spelt_out_schemes
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.texts import load_calibration_texts
from pipeline.errors import QuantgateError
from pipeline.evalsets.cards import Evalset
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.optimize.quantize import copy_text_files, quantize
from pipeline.products.text.schemes import PRESETS
from pipeline.products.text.step_settings import Calibration, QuantizeStep

TOKENIZER = Path("models/agent")
CALIBRATION = Calibration(sources=["prose"], num_samples=4, max_tokens=256, length_exponent=0.0)
WIDTH = 128  # which all groups and blocks divide
SHARING: list[dict[str, Any]] = [
    *({"strategy": strategy} for strategy in ("tensor", "channel", "token")),
    {"strategy": "group", "group_size": 32},
    {"strategy": "tensor_group", "group_size": 16},
    {"strategy": "tensor_group", "group_size": 32},
    {"strategy": "block", "block_structure": [WIDTH, WIDTH]},
]
BESIDE_INPUTS = [PRESETS[name].weights for name in ("W8A8", "FP8_DYNAMIC", "W4A16", "NVFP4A16")]


def main() -> None:
    """Print what was made and what failed; exit with 1 where something that settings allow failed."""
    texts, counts = load_calibration_texts(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        source = write_model(Path(folder) / "source")
        for number, settings in enumerate(list_settings()):
            step = read_step(settings)
            outcome = (
                "refused by the settings" if step is None else make(step, source, texts, Path(folder) / f"{number}")
            )
            counts[outcome] += 1
    print(dict(counts))
    raise SystemExit(counts["failed"] > 0)


def write_model(folder: Path) -> Path:
    """Write a Llama of one layer in bfloat16, as FP4 and MXFP8 are unpacked into it alone."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=1024,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    copy_text_files(TOKENIZER, folder)
    return folder


def list_settings() -> Iterator[dict[str, Any]]:
    """Yield the fields of weights in every combination, then those of inputs beside four kinds of weights."""
    for numbers in list_numbers():
        yield {"weights": numbers}
    for weights, numbers, dynamic in product(BESIDE_INPUTS, list_numbers(), (False, True, "local")):
        yield {"weights": weights, "input_activations": numbers | {"dynamic": dynamic}}


def list_numbers() -> Iterator[dict[str, Any]]:
    """Yield every combination of the fields of numbers, but for asymmetric floats."""
    scales = (None, "float8_e4m3fn", "uint8")
    for bits, kind, sharing, symmetric, scale in product((4, 8), ("int", "float"), SHARING, (True, False), scales):
        if symmetric or kind == "int":
            yield {"num_bits": bits, "type": kind, "symmetric": symmetric, "scale_dtype": scale, **sharing}


def read_step(settings: dict[str, Any]) -> QuantizeStep | None:
    """Return a step with calibration where it needs one; None: the settings contradict themselves."""
    for calibration in (None, CALIBRATION):
        step = QuantizeStep.model_validate({"kind": "quantize", "calibration": calibration, **settings})
        if not any(step.find_problems()):
            return step
    return None


def make(step: QuantizeStep, source: Path, texts: Evalset, target: Path) -> str:
    """Quantise; return what became of it, and print what failed."""
    name = step.resolve().name
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            quantize(source, target, step=step, calibration_set=texts)
        read_checkpoint(target, root=target.parent)
    except QuantgateError as error:
        print(f"{name}: {error}", flush=True)
        return "failed"
    return "weights alone" if step.input_activations is None else "weights and inputs"


if __name__ == "__main__":
    main()
