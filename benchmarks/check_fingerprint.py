"""Does the drift check name what changed? Each drift is planted in a live server, and the check is run against it.

A small project is evaluated once: the shipped agent with its draft, 40 tool calls, float32. Then a server is started
that differs in one thing, and `pipeline.products.text.drift.check_drift` (the script `scripts/check_drift.py`) looks at
it. A move of the folder and another port must be accepted. Exits non-zero when a drift goes unnamed or a move is
refused.

    python -m benchmarks.check_fingerprint

Not covered: drift of a server that offers no fingerprint, which its answers alone can show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from evalsets.seal import seal
from pipeline.products.params import get_product, parse_params
from pipeline.products.text.drift import CONCURRENCY, Drift, check_drift
from pipeline.products.text.evals.evaluate import evaluate_candidate
from pipeline.products.text.optimize.candidate import build_candidate
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct
from pipeline.records.evaluations import Candidate

ROOT = Path(__file__).resolve().parents[1]
PRODUCT, NAME, NUM_CASES = "agent", "drafted", 40
ENGINE_DEFAULT = (
    "import dataclasses, pipeline.products.text.serving.sizing as s; "
    "s.DEVICE_SIZES = {k: dataclasses.replace(v, max_batch_tokens=256) for k, v in s.DEVICE_SIZES.items()}; "
)
LAUNCH = "import sys; from pipeline.products.text.serving.launcher import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Server:
    """How the next server is started; a drift changes one thing of it."""

    root: Path
    candidate: Candidate
    checkpoint: Path
    draft: Path
    code: str = LAUNCH
    environment: dict[str, str] = field(default_factory=dict)

    def serve_with(self, **serving: Any) -> None:
        """Change serving settings."""
        changed = self.candidate.serving.model_copy(update=serving)
        self.candidate = self.candidate.model_copy(update={"serving": changed})

    @contextlib.contextmanager
    def run(self) -> Iterator[str]:
        """Start it; yield its address, or the line with which it refused to start."""
        asked = {
            "checkpoint_folder": str(self.checkpoint),
            "draft_folder": str(self.draft),
            "candidate": self.candidate.model_dump(mode="json"),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", self.code, json.dumps(asked)],
            cwd=ROOT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None and process.stdin is not None
        try:
            line = process.stdout.readline()
            yield f"http://127.0.0.1:{json.loads(line)['port']}" if line else process.stderr.read().splitlines()[-1]
        finally:
            process.stdin.close()
            process.wait()


def change_weight(folder: Path) -> None:
    """Add 0.01 to one weight, at the same path."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.ndim == 2)
    tensors[name][0, 0] += 0.01
    save_file(tensors, path, metadata={"format": "pt"})


def change_json(path: Path, **values: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def fake_version(server: Server) -> None:
    """Put another version of a library in front of the installed one, as far as its metadata say."""
    folder = server.root / "site/safetensors-0.99.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.99.0\n")
    server.environment["PYTHONPATH"] = str(folder.parent)


def move(server: Server) -> None:
    """Serve the same files from elsewhere; the port is another one each time."""
    server.checkpoint = server.checkpoint.rename(server.root / "elsewhere")


DRIFTS: dict[str, tuple[Callable[[Server], Any], str]] = {
    "another draft": (lambda s: change_weight(s.draft), "serving.speculative.draft_digest"),
    "k changed": (
        lambda s: s.serve_with(speculative=s.candidate.serving.speculative.model_copy(update={"num_tokens": 4})),
        "serving.speculative.num_tokens",
    ),
    "one weight, same path": (lambda s: change_weight(s.checkpoint), "model.safetensors differs"),
    "repetition penalty": (
        lambda s: change_json(s.checkpoint / "generation_config.json", repetition_penalty=1.1),
        "generation_config.json",
    ),
    "sampling default": (
        lambda s: change_json(s.checkpoint / "generation_config.json", temperature=0.7),
        "generation_config.json differs",
    ),
    "chat template": (
        lambda s: (s.checkpoint / "chat_template.jinja").write_text(
            (s.checkpoint / "chat_template.jinja").read_text() + "{# #}"
        ),
        "chat_template.jinja differs",
    ),
    "dtype": (lambda s: s.serve_with(dtype="bfloat16"), "serving.dtype"),
    "library version": (fake_version, "libraries.safetensors"),
    "an engine default": (lambda s: setattr(s, "code", ENGINE_DEFAULT + LAUNCH), "engine.max_batch_tokens"),
    "environment": (lambda s: s.environment.update(ATEN_CPU_CAPABILITY="avx2"), "environment.ATEN_CPU_CAPABILITY"),
    "nothing: another port": (lambda s: None, ""),
    "nothing: a moved folder": (move, ""),
}


def write_project(root: Path) -> TextProduct:
    """Write a project of the shipped agent with its draft, and of a few tool calls."""
    for name in ("models/agent", "models/agent-draft", "evalsets/tool_calls"):
        shutil.copytree(ROOT / name, root / name)
    cases = root / "evalsets/tool_calls/cases.jsonl"
    cases.write_text("".join(cases.read_text().splitlines(keepends=True)[:NUM_CASES]))
    seal(cases.parent)
    shipped = YAML(typ="safe").load((ROOT / "params.yaml").read_text())["products"][PRODUCT]
    shipped["gate"].pop("loosened", None)  # nothing was released there before
    step = {"kind": "speculative", "method": "draft_model", "draft": "models/agent-draft", "num_speculative_tokens": 5}
    product = shipped | {
        "reference": "reference",
        "release": [NAME],
        "evals": {"calls": {"kind": "tool_calls", "evalset": "evalsets/tool_calls"}},
        "resources": shipped["resources"] | {"num_servers": 1},
        "canary": {"num_prompts": 20, "target_rate": 0.2},
        "gate": shipped["gate"] | {"tolerances": {"calls/tool_call_exact_match": {"overall": 0.1}}, "tripwires": {}},
        "benchmark": shipped["benchmark"] | {"candidates": []},
    }
    candidates = {
        name: {"product": PRODUCT, "checkpoint": "models/agent", "steps": steps}
        for name, steps in (("reference", []), (NAME, [step]))
    }
    params = parse_params({"products": {PRODUCT: product}, "candidates": candidates})
    return get_product(params, PRODUCT, kind=TextProduct)


def look(root: Path, candidate: Candidate, product: TextProduct, url: str) -> Drift:
    """Run the drift check against a server."""

    async def run() -> Drift:
        async with Client([url], candidate.name, concurrency=CONCURRENCY, timeout_s=60) as client:
            return await check_drift(candidate, product, client, root=root, num_cases=NUM_CASES)

    return asyncio.run(run())


def observe(name: str, base: Path, candidate: Candidate, product: TextProduct, folder: Path) -> tuple[str, str]:
    """Plant one drift; return what the check says and how many answers changed."""
    shutil.copytree(base / "models", folder / "models")
    server = Server(folder, candidate, folder / "models/agent", folder / "models/agent-draft")
    DRIFTS[name][0](server)
    with server.run() as started:
        if not started.startswith("http"):
            return f"does not start: {started.removeprefix('error: ')}", "–"
        drift = look(base, candidate, product, started)
    found = drift.fingerprint
    said = "; ".join(found.differences) or ("agrees" if found.is_whole else "could not be compared as a whole")
    return said, f"{len(drift.changed)} of {drift.num_asked}"


def main() -> int:
    """Plant all drifts and print the table."""
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "project"
        product = write_project(base)
        build = base / product.build
        build_candidate(NAME, product, root=base, build=build)
        candidate = read_candidate(build, NAME, product)
        asyncio.run(evaluate_candidate(candidate, product, root=base, build=build))
        print("| planted | what the drift check says | answers changed |\n|---|---|---:|")
        for name, (_, expected) in DRIFTS.items():
            said, changed = observe(name, base, candidate, product, Path(temporary) / name.replace(" ", "-"))
            wrong += [name] if (expected not in said if expected else said != "agrees") else []
            print(f"| {name} | {said.replace(temporary, '')} | {changed} |", flush=True)
    print(f"\n{len(wrong)} of {len(DRIFTS)} rows are wrong" + (f": {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
