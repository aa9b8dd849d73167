"""What does quantising cost beyond the library that does it, in time and in memory?

Builds a candidate as `stages.optimize` does, with all its checks and digests, and runs llm-compressor's own minimal
script on the same checkpoint with the same samples. Each has a process of its own, in turn, for some rounds; which
goes first alternates. Before that each runs once, untimed, on the shipped agent: who comes first pays for compiling
Python files and for reading the libraries from disk. Prints both, their ratios, and where the time of each went. The
calibration texts are those of evalsets/calibration, joined and repeated until a sample has as many tokens as asked.

    python -m benchmarks.quantize_cost [--checkpoint models/agent] [--method gptq] [--scheme W4A16] [--samples 64]
        [--tokens 256] [--group-size 128] [--threads N] [--rounds 3] [--only stage]

`--method rtn` rounds to nearest, without samples. `--group-size` is that of W4A16; other schemes have their own.
`--only` measures one of the two alone.

`python -m benchmarks.language_models 8b FOLDER` writes a checkpoint of a real size. Host memory is what the process
holds itself (RssAnon, read every 50 ms): pages of mapped files, which the system drops at need, are not in it.

Not covered: several GPUs, and reading a checkpoint that is not in the system's page cache yet. Killed, it leaves the
measured process running.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.texts import load_calibration_texts
from pipeline.evalsets.cards import load_evalset
from pipeline.products.params import load_params
from pipeline.products.text.checkpoints import embedding_rows
from pipeline.products.text.model_loading import load_tokenizer
from pipeline.products.text.optimize.calibration import count_samples, select_samples
from pipeline.products.text.schemes import PRESETS
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.step_settings import Calibration, QuantizeStep

INTERVAL_S = 0.05  # between two looks at a process's memory
BUCKET = "prose"
GROUPED = "W4A16"

# What the library's documentation shows, with its defaults but for batching and shuffling, which would change the
# samples. Without an accelerator its AWQ crashes on pinned memory.
LIBRARY_SCRIPT = """
import json, sys, time
clock = [time.perf_counter()]
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer
job = json.load(open(sys.argv[1]))
step = job["step"]
torch.set_num_threads(job["num_threads"])
if not torch.cuda.is_available():
    IntermediatesCache.pin_memory = lambda *_: None
clock.append(time.perf_counter())
model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(job["checkpoint"])
clock.append(time.perf_counter())
calibration = {}
if job["samples"]:
    data = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job["samples"]])
    calibration = dict(dataset=data, num_calibration_samples=len(data), max_seq_length=max(map(len, job["samples"])),
                       batch_size=1, shuffle_calibration_samples=False)
scheme = dict(targets=["Linear"], scheme=step["scheme"], ignore=step["exclude"])
if step["group_size"]:
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=step["group_size"])
    scheme = dict(config_groups={"g": dict(targets=["Linear"], weights=weights)}, ignore=step["exclude"])
if step["algorithm"] == "awq":
    recipe = [AWQModifier(duo_scaling=True, n_grid=step["num_grid_points"]), QuantizationModifier(**scheme)]
elif step["algorithm"] == "gptq":
    recipe = GPTQModifier(**scheme, dampening_frac=step["damping_fraction"],
                          actorder="static" if step["activation_order"] else None)
else:
    recipe = QuantizationModifier(**scheme)
oneshot(model=model, tokenizer=tokenizer, recipe=recipe, **calibration)
clock.append(time.perf_counter())
model.save_pretrained(sys.argv[2], save_compressed=True)
tokenizer.save_pretrained(sys.argv[2])
clock.append(time.perf_counter())
phases = dict(zip(["import", "load", "quantise", "save"], [b - a for a, b in zip(clock, clock[1:])]))
peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
json.dump({"gpu_mib": peak >> 20, "phases": phases, "end": time.time()}, open(sys.argv[3], "w"))
"""

STAGE_SCRIPT = """
import json, sys, time
start = time.perf_counter()
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from pipeline.products.params import load_params
from pipeline.products.text.optimize.candidate import build_candidate
from pipeline.products.text.settings import CandidateSettings, TextProduct
job = json.load(open(sys.argv[1]))
product = next(p for p in load_params().products.values() if isinstance(p, TextProduct))
optimize = {"calibration_texts": job["texts"], "num_threads": job["num_threads"]}
product = product.model_copy(update={
    "optimize": product.optimize.model_copy(update=optimize),
    "candidates": {"made": CandidateSettings(checkpoint=job["checkpoint"], steps=[job["step"]])},
})
phases = {"import": time.perf_counter() - start}
root = Path(sys.argv[2])
build_candidate("made", product, root=root, build=root / "build")
peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
json.dump({"gpu_mib": peak >> 20, "phases": phases, "end": time.time()}, open(sys.argv[3], "w"))
"""

SCRIPTS = {"stage": STAGE_SCRIPT, "script": LIBRARY_SCRIPT}


@dataclass(frozen=True)
class Run:
    """What one process took."""

    wall_s: float
    cpu_s: float
    host_mib: int  # RssAnon at its highest
    resident_mib: int  # with mapped files, at its highest
    gpu_mib: int
    phases: dict[str, float]


COLUMNS: dict[str, Callable[[Run], float]] = {
    "wall s": lambda run: run.wall_s,
    "CPU s": lambda run: run.cpu_s,
    "host MiB": lambda run: run.host_mib,
    "resident MiB": lambda run: run.resident_mib,
    "GPU MiB": lambda run: run.gpu_mib,
}


def main() -> None:
    """Measure, and print a line a run, the ratios and the phases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("models/agent"))
    parser.add_argument("--method", choices=("rtn", "gptq", "awq"), default="gptq")
    parser.add_argument("--scheme", choices=PRESETS, default=GROUPED)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each sample")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--threads", type=int, help="of torch, for both; else as params.yaml says")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=SCRIPTS, help="measure this one alone, without the other and a ratio")
    arguments = parser.parse_args()
    kinds = [arguments.only] if arguments.only else list(SCRIPTS)
    runs: dict[str, list[Run]] = {"stage": [], "script": []}
    with tempfile.TemporaryDirectory() as folder:
        warm_up(Path(folder) / "warm", arguments)
        job = write_job(Path(folder) / "job", arguments)
        for number in range(1, arguments.rounds + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                made = run(SCRIPTS[kind], job, Path(folder) / f"{kind}-{number}")
                runs[kind].append(made)
                numbers = ", ".join(f"{name} {read(made):,.1f}" for name, read in COLUMNS.items())
                print(f"round {number}: {kind}: {numbers}", flush=True)
    print("\n".join(format_summary(runs["stage"], runs["script"])))


def format_summary(stage: list[Run], script: list[Run]) -> Iterator[str]:
    """Write the ratio of each number where both were measured, and the median seconds of each phase."""
    for name, read in COLUMNS.items():
        ratios = sorted(read(a) / read(b) for a, b in zip(stage, script, strict=False) if read(b))
        if ratios:
            yield (
                f"{name}: stage / script: median {statistics.median(ratios):.3f} of {len(ratios)} rounds, from "
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            )
    for kind, runs in (("stage", stage), ("script", script)):
        if not runs:
            continue
        names = dict.fromkeys(name for made in runs for name in made.phases)
        medians = {name: statistics.median(made.phases.get(name, 0.0) for made in runs) for name in names}
        yield f"{kind}: " + ", ".join(f"{name} {value:.1f} s" for name, value in medians.items())


def warm_up(folder: Path, arguments: argparse.Namespace) -> None:
    """Run what is measured on the shipped agent with few samples."""
    few = {"checkpoint": Path("models/agent"), "samples": 32, "tokens": 64, "group_size": 32}
    job = write_job(folder, argparse.Namespace(**vars(arguments) | few))
    for kind in [arguments.only] if arguments.only else SCRIPTS:
        run(SCRIPTS[kind], job, folder / kind)


def write_job(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write what both scripts do as JSON: the checkpoint, the step, and the samples that it draws."""
    product = next(p for p in load_params().products.values() if isinstance(p, TextProduct))
    checkpoint = arguments.checkpoint.resolve()
    calibration = Calibration(
        sources=[BUCKET], num_samples=arguments.samples, max_tokens=arguments.tokens, length_exponent=0.0
    )
    needs_texts = arguments.method != "rtn" or PRESETS[arguments.scheme].needs_calibration
    step = QuantizeStep(
        kind="quantize",
        algorithm=arguments.method,
        scheme=arguments.scheme,
        group_size=arguments.group_size if arguments.scheme == GROUPED else None,
        calibration=calibration if needs_texts else None,
    )
    tokenizer = load_tokenizer(checkpoint)
    folder.mkdir()
    write_texts(folder / "texts", tokenizer, calibration)
    texts, num_rows = load_evalset(folder / "texts"), embedding_rows(checkpoint)
    samples = select_samples(texts, tokenizer, calibration, vocab_size=num_rows) if needs_texts else []
    calibrated = count_samples(samples) if samples else "no samples"
    print(f"{step.algorithm} of {checkpoint}, {step.scheme}: {calibrated}", flush=True)
    job = {
        "checkpoint": str(checkpoint),
        "texts": str(folder / "texts"),
        "step": step.model_dump(mode="json"),
        "samples": samples,
        "num_threads": arguments.threads or product.optimize.num_threads,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    return path


def write_texts(folder: Path, tokenizer: Any, calibration: Calibration) -> None:
    """Write an evalset with a document for each sample, of at least as many tokens as a sample has."""
    texts = cycle(case.text for case in load_calibration_texts().cases if BUCKET in case.buckets)
    cases = []
    for number in range(calibration.num_samples):
        text = next(texts)
        while len(tokenizer(text, add_special_tokens=False)["input_ids"]) < calibration.max_tokens:
            text += "\n" + next(texts)
        cases.append({"id": str(number), "cluster": str(number), "buckets": [BUCKET], "text": text})
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    card = {
        **{key: "calibration" for key in ("name", "description", "made_by", "cluster")},
        **{"version": "1", "licence": "Apache-2.0", "kind": "documents", "buckets": {BUCKET: len(cases)}},
        **{"num_cases": len(cases), "num_clusters": len(cases), "sha256": hashlib.sha256(lines.encode()).hexdigest()},
    }
    folder.mkdir()
    (folder / "cases.jsonl").write_text(lines, encoding="utf-8")
    (folder / "card.yaml").write_text(json.dumps(card), encoding="utf-8")  # JSON is YAML


def run(script: str, job: Path, output: Path) -> Run:
    """Run a script in a process of its own, and look at its memory while it runs."""
    report, errors = output.with_suffix(".json"), output.with_suffix(".err")
    output.mkdir()
    start = time.perf_counter()
    with errors.open("w", encoding="utf-8") as stderr:
        command = [sys.executable, "-c", script, str(job), str(output), str(report)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        host_mib, ended = 0, (0, 0, None)
        while not ended[0]:
            time.sleep(INTERVAL_S)
            host_mib = max(host_mib, read_anonymous_mib(process.pid))
            ended = os.wait4(process.pid, os.WNOHANG)
    end, wall = time.time(), time.perf_counter() - start
    _, status, usage = ended
    text = errors.read_text(encoding="utf-8")
    if status or usage is None:
        sys.exit(f"the measured script failed:\n{text[-2000:]}")
    measured = json.loads(report.read_text(encoding="utf-8"))
    phases = measured["phases"] | read_phases(text) | {"end the process": end - measured["end"]}
    phases["the rest"] = wall - sum(phases.values())
    return Run(
        wall_s=wall,
        cpu_s=usage.ru_utime + usage.ru_stime,
        host_mib=host_mib,
        resident_mib=usage.ru_maxrss >> 10,
        gpu_mib=measured["gpu_mib"],
        phases=phases,
    )


def read_anonymous_mib(pid: int) -> int:
    """Return the memory of a process that no file backs; 0 when it has ended."""
    try:
        match = re.search(r"^RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match.group(1)) >> 10 if match else 0


def read_phases(text: str) -> dict[str, float]:
    """Return the seconds by phase that a stage says on stderr."""
    lines = [line for line in text.splitlines() if line.startswith("seconds: ")]
    parts = lines[-1].removeprefix("seconds: ").partition(";")[0] if lines else ""
    return {name: float(value) for name, value in re.findall(r"([a-z][a-z ]*) (\d+\.\d) s", parts)}


if __name__ == "__main__":
    main()
