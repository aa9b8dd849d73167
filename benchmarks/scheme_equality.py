"""Does a quantised checkpoint say the same in the embedded endpoint and in another library?

    python -m benchmarks.scheme_equality [--checkpoint models/agent] [--schemes NAME ...] [--cases 20] [--documents 20]
        [--vllm PYTHON] [--dtype float32] [--lm-eval]

Makes a checkpoint by each preset of `kind: quantize`, as `benchmarks.schemes` does, and serves it by the embedded
endpoint in float32 with continuous batching. Plain transformers answers the same prompts in a process of its own that
has nothing of the project in it: first turns of `evalsets/tool_calls` and of `evalsets/workflows`, by the chat
template, greedily, one at a time. A row has the answers that differ, and the largest difference of a token's
log-probability over documents of `evalsets/prose`, cut after 200 tokens. The last column is plain transformers in
bfloat16.

transformers unpacks FP4 and MXFP8 into bfloat16 alone. The endpoint loads them so and widens them to float32, and so
does the plain process: it loads in bfloat16, runs one forward pass, and calls `torch.nn.Module.float`.

`--vllm` names a Python that has vLLM, which then answers in place of transformers, in `--dtype`. A checkpoint that it
can't run is a row with its error. Log-probabilities are those of the prompt's tokens.

`--lm-eval` runs lm-eval's own command line on the folder in float32 for its task `prose`, all documents, and prints
nats a token beside the endpoint's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.check_perplexity import run_lm_eval
from benchmarks.schemes import MIXES, NAMES, make
from pipeline.evalsets.cards import load_evalset
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.evals.framing import read_frame, rolling_windows
from pipeline.products.text.model_config import read_config
from pipeline.products.text.model_loading import load_tokenizer
from pipeline.products.text.schemes import PRESETS, unpacks_to_bfloat16
from pipeline.products.text.serving.engines import registry as engines
from pipeline.products.text.settings import EvalSettings, PerplexityEval, ResourceSettings, ToolCallsEval
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig

SERVING = ServingConfig(dtype="float32", continuous_batching=True, concurrency=64, context_length=1024, max_tokens=64)
RESOURCES = ResourceSettings(num_servers=1, request_timeout_s=120, start_timeout_s=120)
EVALS: dict[str, EvalSettings] = {
    "calls": ToolCallsEval(kind="tool_calls", evalset="evalsets/tool_calls"),
    "prose": PerplexityEval(kind="perplexity", evalset="evalsets/prose"),
}
CHATS = ("evalsets/tool_calls", "evalsets/workflows")
NUM_TOKENS = 200  # of a document

PLAIN_SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
job = json.load(open(sys.argv[1]))
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(job["folder"])
dtype = torch.bfloat16 if job["widen"] else getattr(torch, job["dtype"])
model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype).eval()
with torch.inference_mode(not job["widen"]), torch.no_grad():
    if job["widen"]:
        model(torch.tensor([[0]]))
        torch.nn.Module.float(model)  # the library's own refuses
    texts, scores = [], []
    for messages in job["prompts"]:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=job["max_tokens"])
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
    for ids in job["documents"]:
        tokens = torch.tensor([ids])
        logprobs = model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        scores.append(logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist())
assert not [name for name in sys.modules if name.split(".")[0] in ("pipeline", "stages")]
json.dump({"texts": texts, "scores": scores}, open(sys.argv[2], "w"))
"""
VLLM_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    job = json.load(open(sys.argv[1]))
    llm = LLM(job["folder"], dtype=job["dtype"], max_model_len=1024, enforce_eager=True, max_num_seqs=8,
              kv_cache_memory_bytes=2**28)
    greedy = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    texts = [output.outputs[0].text for output in llm.chat(job["prompts"], greedy)]
    echo = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["documents"]], echo)
    scores = [[place[token].logprob for place, token in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:])]
              for o in outputs]
    json.dump({"texts": texts, "scores": scores}, open(sys.argv[2], "w"))
"""


def main() -> None:
    """Print a table, a row a scheme."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("models/agent"))
    parser.add_argument("--schemes", nargs="+", choices=(*NAMES, *MIXES), default=(*PRESETS, "FP8_DYNAMIC+kv_tensor"))
    parser.add_argument("--cases", type=int, default=20, help="of each evalset")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM")
    parser.add_argument("--dtype", default="float32", help="of vLLM")
    parser.add_argument("--lm-eval", action="store_true", help="nats a token beside lm-eval's, and nothing else")
    arguments = parser.parse_args()
    if arguments.lm_eval:
        compare_lm_eval(arguments.checkpoint, arguments.schemes)
        return
    prompts = [
        [message.model_dump() for message in case.messages]
        for evalset in CHATS
        for case in load_evalset(Path(evalset)).cases[: arguments.cases]
    ]
    tokenizer = load_tokenizer(arguments.checkpoint)
    texts = [case.text for case in load_evalset(Path("evalsets/prose")).cases[: arguments.documents]]
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"][:NUM_TOKENS] for text in texts]
    others = [f"vLLM, {arguments.dtype}"] if arguments.vllm else ["transformers, float32", "transformers, bfloat16"]
    print("| scheme |" + "".join(f" {other}: answers that differ | nats a token apart, at most |" for other in others))
    print("|---|" + "---:|---:|" * len(others))
    for name in arguments.schemes:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made"
            make(arguments.checkpoint, made, name)
            ours = asyncio.run(serve(made, prompts, documents))
            job = {"folder": str(made), "prompts": prompts, "documents": documents, "max_tokens": SERVING.max_tokens}
            cells = []
            for other in others:
                dtype = other.split()[-1]
                widen = dtype == "float32" and unpacks_to_bfloat16(read_config(made).get("quantization_config") or {})
                script, python = (
                    (VLLM_SCRIPT, str(arguments.vllm)) if arguments.vllm else (PLAIN_SCRIPT, sys.executable)
                )
                theirs = run_apart(script, python, job | {"dtype": dtype, "widen": widen})
                cells += [theirs, ""] if isinstance(theirs, str) else compare(ours, theirs)
        print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)


def compare_lm_eval(checkpoint: Path, schemes: Sequence[str]) -> None:
    """Print a table of nats a token, a row a scheme."""
    print("| scheme | endpoint, nats a token | lm-eval | apart |\n|---|---:|---:|---:|")
    for name in schemes:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made"
            make(checkpoint, made, name)
            nats, num_tokens, num_bytes = asyncio.run(score_windows(made))
            candidate = build_candidate(made)
            found = candidate.checkpoint.model_copy(update={"path": str(made)})
            results, _ = run_lm_eval(candidate.model_copy(update={"checkpoint": found}), ["prose"])
            theirs = results["prose"]["bits_per_byte,none"] * math.log(2) * num_bytes / num_tokens
        ours = nats / num_tokens
        print(f"| `{name}` | {ours:.6f} | {theirs:.6f} | {abs(ours - theirs):.1e} |", flush=True)


async def score_windows(folder: Path) -> tuple[float, int, int]:
    """Return the endpoint's nats, tokens and bytes of all documents of the eval `prose`."""
    cases = load_evalset(Path("evalsets/prose")).cases
    root = folder.parent
    launch = engines.start_engine(build_candidate(folder), RESOURCES, evals=EVALS, root=root, logs=root / "logs")
    async with launch as (_, client):
        frame = await read_frame(client, folder)
        texts = await client.tokenize([case.text for case in cases], add_special_tokens=False)
        documents = [frame.frame_document(ids) for ids in texts]
        size = SERVING.context_length
        windows = [w for ids in documents for w in rolling_windows(ids, first=frame.first, max_tokens=size)]
        scores = await client.score([window for window, _ in windows], top_logprobs=1)
    nats = -math.fsum(float(x) for s, (_, n) in zip(scores, windows, strict=True) for x in s.token_logprobs[-n:])
    return nats, sum(map(len, documents)), sum(len(case.text.encode()) for case in cases)


def build_candidate(folder: Path) -> Candidate:
    """Describe a checkpoint as the embedded engine serves it."""
    return Candidate(name="made", checkpoint=read_checkpoint(folder, root=folder.parent), serving=SERVING, libraries={})


async def serve(
    folder: Path, prompts: Sequence[list[dict[str, Any]]], documents: Sequence[list[int]]
) -> dict[str, Any]:
    """Answer and score by the embedded endpoint, all requests in flight at once."""
    root = folder.parent
    launch = engines.start_engine(build_candidate(folder), RESOURCES, evals=EVALS, root=root, logs=root / "logs")
    async with launch as (_, client):
        replies = await asyncio.gather(*(client.chat(p, max_tokens=SERVING.max_tokens) for p in prompts))
        scores = await client.score(documents, top_logprobs=1) if documents else []
    return {"texts": [reply.text for reply in replies], "scores": [s.token_logprobs.tolist() for s in scores]}


def run_apart(script: str, python: str, job: dict[str, Any]) -> dict[str, Any] | str:
    """Answer and score in a process of its own, outside the project; return its error in a line where it fails."""
    with tempfile.TemporaryDirectory() as temporary:
        code, asked, result = (Path(temporary) / name for name in ("run.py", "job.json", "result.json"))
        code.write_text(script)
        asked.write_text(json.dumps(job))
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        command = [python, str(code), str(asked), str(result)]
        done = subprocess.run(command, cwd=temporary, env=environment, capture_output=True, text=True)
        for line in dict.fromkeys(
            re.findall(r"(?:Using|Selected) \S+ for .*|Using .*backend.*", done.stdout + done.stderr)
        ):
            print(f"  {line}", file=sys.stderr)
        return find_error(done.stdout + done.stderr) if done.returncode else dict(json.loads(result.read_text()))


def find_error(log: str) -> str:
    """Return the first error of a log: what follows is of those who noticed it."""
    errors = re.findall(r"\b((?:\w+\.)*\w*(?:Error|Exception): .*)", log)
    return errors[0] if errors else log[-200:].replace("\n", " ")


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return how many answers differ, and by how much a token's log-probability does at most."""
    num_different = sum(a != b for a, b in zip(ours["texts"], theirs["texts"], strict=True))
    pairs = zip(ours["scores"], theirs["scores"], strict=True)
    largest = max((abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True)), default=0.0)
    return [f"{num_different} of {len(ours['texts'])}", f"{largest:.1e}"]


if __name__ == "__main__":
    main()
