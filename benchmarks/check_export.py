"""An exported folder means the same to plain transformers: `python -m benchmarks.check_export [--cases 60]`.

For every quantised candidate in `build/<product>/candidates`, of each product of kind text: loads its
folder in a process of its own that has no quantgate in it, generates greedily (float32, one prompt at a
time) for tool calls and for the first turn of workflows, and compares with what the endpoint answered to
the same prompts when the candidate was evaluated. Proves that the folder is whole (weights, tokenizer,
template, generation config), and that batching, prefix sharing and packed layers change no answer.

Not covered: later turns, other engines (for vLLM see docs/engines.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.evalsets.cards import load_evalset
from pipeline.products.params import load_params
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct, ToolCallsEval, TrajectoriesEval
from pipeline.records.evaluations import Candidate, Evaluation, read_cases
from pipeline.records.record_files import read_record

PLAIN_SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
job = json.load(open(sys.argv[1]))
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(job["folder"])
model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
texts = []
for messages in job["prompts"]:
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=job["max_tokens"])
    texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
assert not [name for name in sys.modules if name.split(".")[0] in ("pipeline", "stages")]
json.dump({"texts": texts, "quantization": type(model.config.quantization_config).__name__}, open(sys.argv[2], "w"))
"""


def main() -> int:
    """Compare every quantised candidate, print a line for each; 1 when an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=60, help="cases of each eval")
    num_cases = parser.parse_args().cases
    products = [product for product in load_params().products.values() if isinstance(product, TextProduct)]
    found = [
        (name, product)
        for product in products
        for name in product.candidates
        if (product.build / "candidates" / name / "checkpoint").is_dir()
    ]
    num_different = sum(compare(name, product, num_cases) for name, product in found)
    print(f"{len(found)} candidates, {num_different} answers differ")
    return 0 if found and not num_different else 1


def compare(name: str, product: TextProduct, num_cases: int) -> int:
    """Generate with plain transformers, print and return how many answers differ from the endpoint's."""
    candidate = read_candidate(product.build, name, product)
    folder = product.build / "evaluations" / name
    if read_record(folder / "evaluation.json", Evaluation).fingerprint != candidate.fingerprint:
        sys.exit(f"{folder}: expected the evaluation of the candidate as it is now; run `dvc repro`")
    prompts, answers = [], []
    for eval_name, settings in product.evals.items():
        if isinstance(settings, ToolCallsEval | TrajectoriesEval):
            cases = load_evalset(Path(settings.evalset)).cases[:num_cases]
            outputs = {record.case_id: record.output for record in read_cases(folder / f"{eval_name}.jsonl")}
            prompts += [[message.model_dump() for message in case.messages] for case in cases]
            answers += [outputs[case.id].split("\n")[0] for case in cases]
    done = generate(candidate, prompts)
    # a record holds one line per turn, with line breaks inside an answer written as \n
    texts = [text.replace("\n", "\\n") for text in done["texts"]]
    different = [(a, b) for a, b in zip(answers, texts, strict=True) if a != b]
    print(f"{name} ({done['quantization']}): {len(different)} of {len(answers)} answers differ", flush=True)
    for endpoint, plain in different[:3]:
        print(f"  endpoint {endpoint!r}\n  plain    {plain!r}")
    return len(different)


def generate(candidate: Candidate, prompts: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Answer prompts with plain transformers in a process of its own, outside the project."""
    with tempfile.TemporaryDirectory() as temporary:
        job, result = Path(temporary) / "job.json", Path(temporary) / "result.json"
        job.write_text(
            json.dumps(
                {
                    "folder": str(Path(candidate.checkpoint.path).resolve()),
                    "prompts": prompts,
                    "max_tokens": candidate.serving.max_tokens,
                }
            )
        )
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", PLAIN_SCRIPT, str(job), str(result)]
        done = subprocess.run(command, cwd=temporary, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{candidate.name}: plain transformers failed:\n{done.stderr[-2000:]}")
        return json.loads(result.read_text())


if __name__ == "__main__":
    sys.exit(main())
