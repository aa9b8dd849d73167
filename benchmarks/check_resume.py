"""A stage killed in the middle goes on where it stopped: `python -m benchmarks.check_resume [--cases 300]`.

Evaluates the reference on the first workflows and tool calls of the shipped evalsets, in a temporary
folder: once undisturbed, and once with SIGKILL to the stage when half of the workflows are journaled,
followed by a second run. Every HTTP request of both runs is counted as it leaves the stage. Proves that

- no case that was finished at the kill is asked again, in whichever eval,
- the records (outputs, scores, tokens; all but latencies) equal those of the undisturbed run,
- the servers end with the stage that was killed.

Cases in progress at the kill have no record yet: they start again, and are counted apart. Needs the
reference in `build/<product>/candidates`. Not covered: a kill of the machine, after which up to 64 cases may be lost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.evalsets.cards import CASES_FILE, compute_seal, load_card, load_evalset
from pipeline.products.params import choose_product, load_params
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct, ToolCallsEval, TrajectoriesEval
from pipeline.records.evaluations import CaseRecord, read_cases
from pipeline.settings.base import Tolerance
from tests.fakes.synthetic_records import describe_project

ROOT = Path(__file__).resolve().parents[1]
# in this order: the first is complete when the second is killed
EVALS: dict[str, type[ToolCallsEval | TrajectoriesEval]] = {"tool_calls": ToolCallsEval, "workflows": TrajectoriesEval}
SERVERS_END_WITHIN_S = 10.0

# The stage as DVC starts it, with every chat request written to a file before it is sent.
STAGE = """
import aiohttp, json, os, sys
from stages import evaluate
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
send = aiohttp.ClientSession.request
def send_and_count(self, method, url, **options):
    if url.endswith("/chat/completions"):
        messages = json.loads(options["data"])["messages"]
        os.write(log, (json.dumps([messages[0]["content"], len(messages)]) + "\\n").encode())
    return send(self, method, url, **options)
aiohttp.ClientSession.request = send_and_count
sys.exit(evaluate.main(sys.argv[1:2]))
"""


def main() -> int:
    """Run both ways, compare, print what was found; 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=300, help="cases of each eval")
    parser.add_argument("--product", help="of kind text; needed where there are several")
    options = parser.parse_args()
    num_cases = options.cases
    product = choose_product(load_params(ROOT / "params.yaml"), options.product, kind=TextProduct)
    name, build = product.reference, product.build
    with tempfile.TemporaryDirectory() as temporary:
        undisturbed, killed = Path(temporary) / "undisturbed", Path(temporary) / "killed"
        for folder in (undisturbed, killed):
            make_project(folder, product, num_cases)
        finish_stage(undisturbed, name)
        finished, num_servers, num_left = kill_in_the_middle(killed, build, name, num_cases // 2)
        before = read_requests(killed)
        finish_stage(killed, name)
        after, total = read_requests(killed) - before, read_requests(undisturbed).total()
        expected, got = (read_evaluation(folder / build, name) for folder in (undisturbed, killed))
    asked = {text for text, _ in after}
    repeated, restarted = asked & finished, asked & {text for text, _ in before} - finished
    differing = [key for key in expected | got if expected.get(key) != got.get(key)]
    print(f"{name}, {num_cases} cases of each of {', '.join(EVALS)}: {total} requests when undisturbed")
    print(f"killed with {len(finished)} cases finished; {before.total()} requests before, {after.total()} after")
    print(f"servers that outlived the stage: {num_left} of {num_servers}")
    print(f"finished cases asked again: {len(repeated)} (in progress at the kill, so started again: {len(restarted)})")
    print(f"records that differ from the undisturbed run: {len(differing)} of {len(expected)} {differing[:3] or ''}")
    holds = num_servers > 0 and not (num_left or repeated or differing)
    print("holds" if holds else "DOES NOT HOLD")
    return 0 if holds else 1


def make_project(folder: Path, product: TextProduct, num_cases: int) -> None:
    """Write settings, shortened evalsets and the reference into `folder`."""
    name, evals = product.reference, {}
    for eval_name, kind in EVALS.items():
        settings = next(settings for settings in product.evals.values() if isinstance(settings, kind))
        cut_evalset(ROOT / settings.evalset, folder / "evalsets" / eval_name, num_cases)
        evals[eval_name] = settings.model_copy(update={"evalset": f"evalsets/{eval_name}"})
    gate = product.gate.model_copy(
        update={
            "tolerances": {"workflows/task_completion_rate": Tolerance(overall=0.03)},
            "tripwires": {},
        }
    )
    product = product.model_copy(update={"evals": evals, "gate": gate})
    (folder / "params.yaml").write_text(json.dumps(describe_project(product)))  # JSON is YAML
    candidate = read_candidate(ROOT / product.build, name, product)
    for path in (f"{product.build}/candidates/{name}", candidate.checkpoint.path):
        if not (folder / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).symlink_to(ROOT / path)


def cut_evalset(source: Path, target: Path, num_cases: int) -> None:
    """Copy the first cases of an evalset, with a card that says so."""
    cases = load_evalset(source).cases[:num_cases]
    if len({case.messages[0].content for case in cases}) != num_cases:
        sys.exit(f"{source}: expected {num_cases} cases that differ in their first message")
    target.mkdir(parents=True)
    (target / CASES_FILE).write_text("".join(case.model_dump_json() + "\n" for case in cases))
    card = load_card(source).model_copy(update=compute_seal(target / CASES_FILE, cases).model_dump())
    (target / "card.yaml").write_text(card.model_dump_json())


def start_stage(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start the evaluate stage in `folder`; its own lines go to this terminal."""
    command = [sys.executable, "-c", STAGE, name, str(folder / "requests.jsonl")]
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})


def finish_stage(folder: Path, name: str) -> None:
    """Run the stage to its end."""
    if code := start_stage(folder, name).wait():
        sys.exit(f"expected the stage to finish, it ended with {code}")


def kill_in_the_middle(folder: Path, build: Path, name: str, num_finished: int) -> tuple[set[str], int, int]:
    """Kill the stage once enough workflows are journaled.

    Returns:
        The first message of every case that the journal holds, and how many servers there were and outlived the stage.
    """
    journal = folder / build / "journal" / name
    stage = start_stage(folder, name)
    while len(read_lines(journal / "workflows.jsonl")) < num_finished:
        if stage.poll() is not None:
            sys.exit(f"the stage ended with {stage.returncode} before {num_finished} workflows were journaled")
        time.sleep(0.05)
    servers = list_children(stage.pid)
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    deadline = time.monotonic() + SERVERS_END_WITHIN_S
    while (left := sum(map(is_running, servers))) and time.monotonic() < deadline:
        time.sleep(0.1)
    finished = set()
    for eval_name in EVALS:
        ids = {entry["record"]["case_id"] for entry in read_lines(journal / f"{eval_name}.jsonl")}
        cases = load_evalset(folder / "evalsets" / eval_name).cases
        finished |= {case.messages[0].content for case in cases if case.id in ids}
    return finished, len(servers), left


def list_children(pid: int) -> list[int]:
    """Return the processes whose parent is `pid`."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [map(int, line.split()) for line in listed.splitlines()]
    return [child for child, parent in pairs if parent == pid]


def is_running(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and that nobody asked about yet does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def read_lines(path: Path) -> list[Any]:
    """Return the whole lines of a JSON-lines file that may still grow, or not exist yet."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def read_requests(folder: Path) -> Counter[tuple[str, int]]:
    """Return how often each request was sent: by first message and length of the conversation."""
    return Counter((text, num_messages) for text, num_messages in read_lines(folder / "requests.jsonl"))


def read_evaluation(build: Path, name: str) -> dict[tuple[str, str], CaseRecord]:
    """Return all records of an evaluation by eval and case, without their latencies."""
    records = {eval_name: read_cases(build / "evaluations" / name / f"{eval_name}.jsonl") for eval_name in EVALS}
    return {
        (eval_name, record.case_id): record.model_copy(update={"latency_s": 0.0})
        for eval_name in EVALS
        for record in records[eval_name]
    }


if __name__ == "__main__":
    sys.exit(main())
