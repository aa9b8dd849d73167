"""What does a GPTQ step cost beyond the library it uses, in CPU seconds?

Runs the step as `stages.optimize` does, and llm-compressor's own minimal script on the same
checkpoint with the same samples, each in a process of its own, in turn, several rounds. Prints both
and their ratio (aim: 1.05). Processes include their imports; files stay in a temporary folder.

    python -m benchmarks.quantize_cost [--candidate NAME] [--rounds 5]

Not covered: wall time, memory, and AWQ, whose search dwarfs any cost of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.evalsets.cards import load_evalset
from pipeline.products.params import load_params
from pipeline.products.text.checkpoints import load_tokenizer
from pipeline.products.text.optimize.calibration import count_samples, select_samples
from pipeline.products.text.settings import GptqStep, TextProduct

# What the library's documentation shows, with its defaults but for batching and shuffling, which
# would change the samples.
LIBRARY_SCRIPT = """
import json, sys
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
job = json.load(open(sys.argv[1]))
model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(job["checkpoint"])
data = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job["samples"]])
weights = dict(num_bits=job["bits"], type="int", symmetric=job["symmetric"], strategy="group",
               group_size=job["group_size"])
recipe = GPTQModifier(config_groups={"g": dict(targets=["Linear"], weights=weights)}, ignore=job["exclude"],
                      dampening_frac=job["damping_fraction"], actorder="static" if job["activation_order"] else None)
oneshot(model=model, tokenizer=tokenizer, dataset=data, recipe=recipe, num_calibration_samples=len(data),
        max_seq_length=max(map(len, job["samples"])), batch_size=1, shuffle_calibration_samples=False)
model.save_pretrained(sys.argv[2], save_compressed=True)
tokenizer.save_pretrained(sys.argv[2])
"""

OUR_SCRIPT = """
import json, sys
from pathlib import Path
from pipeline.evalsets.cards import load_evalset
from pipeline.products.text.optimize.registry import STEPS
from pipeline.products.text.settings import GptqStep
job = json.load(open(sys.argv[1]))
STEPS["gptq"](Path(job["checkpoint"]), Path(sys.argv[2]), step=GptqStep.model_validate(job["step"]),
              calibration_set=load_evalset(Path(job["calibration_texts"])))
"""


def main() -> None:
    """Measure, and print one line a round and the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--candidate", help="a candidate of params.yaml whose first step is gptq; default: the first")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ours, library = [], []
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), arguments.candidate)
        for number in range(1, arguments.rounds + 1):
            ours.append(run(OUR_SCRIPT, job, Path(folder) / f"ours-{number}"))
            library.append(run(LIBRARY_SCRIPT, job, Path(folder) / f"library-{number}"))
            print(
                f"round {number}: ours {ours[-1]:.2f} CPU-s, library {library[-1]:.2f} CPU-s, "
                f"ratio {ours[-1] / library[-1]:.3f}",
                flush=True,
            )
    ratios = sorted(a / b for a, b in zip(ours, library, strict=True))
    print(
        f"ratio: median {statistics.median(ratios):.3f} of {len(ratios)} rounds, from {ratios[0]:.3f} to "
        f"{ratios[-1]:.3f}; fastest against fastest {min(ours) / min(library):.3f}"
    )


def write_job(folder: Path, name: str | None) -> Path:
    """Write what both scripts do as JSON: the checkpoint, the step, and the samples it draws."""
    products = [product for product in load_params().products.values() if isinstance(product, TextProduct)]
    found = {
        key: (c, product.optimize.calibration_texts)
        for product in products
        for key, c in product.candidates.items()
        if c.steps and isinstance(c.steps[0], GptqStep)
    }
    if not found or name not in (None, *found):
        known = ", ".join(found) or "none"
        raise SettingsError(f"--candidate: expected one whose first step is gptq ({known}), got {name!r}")
    chosen = name or next(iter(found))
    candidate, texts = found[chosen]
    step = candidate.steps[0]
    evalset = load_evalset(Path(texts))
    samples = select_samples(evalset, load_tokenizer(Path(candidate.checkpoint)), step.calibration)
    print(f"{chosen}: {candidate.checkpoint}, {count_samples(samples)}")
    settings = step.model_dump(mode="json")
    job = settings | {
        "checkpoint": candidate.checkpoint,
        "calibration_texts": texts,
        "samples": samples,
        "step": settings,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def run(script: str, job: Path, output: Path) -> float:
    """Run a script in a process of its own and return its CPU seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(job), str(output)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors = process.stderr.read() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the measured script failed:\n{errors[-2000:]}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
