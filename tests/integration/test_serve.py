"""An evaluated candidate served again by `scripts/serve.py`, and what `scripts/check_drift.py` says of servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.products.params import get_product, load_params
from pipeline.products.text.evals.evaluate import evaluate_candidate
from pipeline.products.text.optimize.candidate import build_candidate
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct
from tests.certify.fault_project import EVALS, GATE, RESOURCES, SERVING, write_evalsets, write_models
from tests.fakes.fake_vllm import answer, make_handler
from tests.fakes.synthetic_records import NO_BENCHMARK, PRODUCT

ROOT = Path(__file__).resolve().parents[2]
STEP = {"kind": "speculative", "method": "prompt_lookup", "num_speculative_tokens": 3}
COMMAND = [sys.executable, str(ROOT / "tests/fakes/fake_vllm.py"), "serve"]
CANDIDATES: dict[str, Any] = {
    "reference": {"steps": []},
    "drafted": {"steps": [STEP]},
    "on-vllm": {"steps": [STEP], "engine": {"kind": "vllm", "command": COMMAND, "version": "0.32.0"}},
    "elsewhere": {"steps": [], "engine": {"kind": "openai", "base_url": "http://127.0.0.1:9", "model": "m"}},
}
EVALUATED = ("drafted", "on-vllm")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of a tiny checkpoint, with drafts from the prompt, evaluated on both engines that we start."""
    folder = tmp_path_factory.mktemp("project")
    write_models(folder / "models")
    write_evalsets(folder / "evalsets")
    candidates = {name: {"checkpoint": "models/tiny"} | c for name, c in CANDIDATES.items()}
    tolerances = {"calls/tool_call_exact_match": {"overall": 0.1}}
    settings = {
        "kind": "text",
        "reference": "reference",
        "release": list(EVALUATED),
        "serving": SERVING,
        "resources": RESOURCES,
        "optimize": {"calibration_texts": "evalsets/prose", "num_threads": 1},
        "evals": {"calls": EVALS["calls"] | {"send_tools": False}},
        "gate": GATE | {"tolerances": tolerances},
        "canary": {"num_prompts": 8, "target_rate": 0.49},
        "benchmark": NO_BENCHMARK,
    }
    owned = {name: {"product": PRODUCT} | c for name, c in candidates.items()}
    data = {"products": {PRODUCT: settings}, "candidates": owned}
    (folder / "params.yaml").write_text(json.dumps(data))  # JSON is YAML
    with contextlib.chdir(folder):
        product = get_product(load_params(), PRODUCT, kind=TextProduct)
        for name in EVALUATED:
            build_candidate(name, product, root=Path(), build=product.build)
            candidate = read_candidate(product.build, name, product)
            asyncio.run(evaluate_candidate(candidate, product, root=Path(), build=product.build))
    return folder


def run(script: str, *argv: str, project: Path) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, from a shell in which no number of threads is set."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *argv],
        cwd=project,
        env=plain_environment(),
        capture_output=True,
        text=True,
    )


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def find_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def serving(project: Path, *argv: str) -> Iterator[str]:
    """Run scripts/serve.py; yield its base URL, press Ctrl-C, and expect that nothing listens there afterwards."""
    # a shell's background job, as CI may be, ignores Ctrl-C, and so would its children
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/serve.py"), *argv],
        cwd=project,
        text=True,
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stderr is not None
    url = process.stdout.readline().partition(" ")[0]
    try:
        assert url, process.stderr.read()
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
    assert (process.returncode, said) == (0, "")
    with socket.socket() as asking:
        assert asking.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


def test_a_served_candidate_is_what_was_evaluated(project: Path) -> None:
    port = find_port()
    with serving(project, "drafted", "--port", str(port)) as url:
        assert url == f"http://127.0.0.1:{port}"
        checked = run("check_drift.py", "drafted", "--base-url", url, project=project)
        taken = run("serve.py", "drafted", "--port", str(port), project=project)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert (
        "0 of 16 answers changed, no difference is tolerated; fingerprint: agrees (compared: checkpoint, serving, "
        "libraries, engine, sampling, environment, hardware)" in checked.stdout
    )
    assert taken.returncode == 1 and taken.stderr.count("\n") == 1
    assert f"expected to listen at 127.0.0.1:{port}, got: Address already in use; name another" in taken.stderr


def test_a_vllm_is_served_from_the_same_configuration_and_a_taken_port_is_refused(project: Path) -> None:
    with serving(project, "on-vllm") as url:
        checked = run("check_drift.py", "on-vllm", "--base-url", url + "/v1", project=project)
        taken = run("serve.py", "on-vllm", "--port", url.rpartition(":")[2], project=project)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert (
        "fingerprint: agrees (compared by what each reply carries: checkpoint, serving, libraries, engine; could "
        "not be compared: sampling, environment, hardware)" in checked.stdout
    )
    assert taken.returncode == 1 and "got: Address already in use; name another address or port" in taken.stderr
    evaluated = project / "build/agent/evaluations/on-vllm/config/vllm.yaml"
    assert (project / "build/agent/logs/on-vllm/served/vllm.yaml").read_text() == evaluated.read_text()


@pytest.fixture
def without_drafts(project: Path) -> Iterator[str]:
    """The same weights on a vLLM of the same release: started without drafts, and telling nothing but its version."""
    config = YAML(typ="safe").load((project / "build/agent/evaluations/on-vllm/config/vllm.yaml").read_text())
    config = {key: value for key, value in config.items() if key != "speculative-config"}
    config["fingerprint-value"] = "vllm-0.32.0-389eb09e"

    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (404, {}) if path.startswith(("/server_info", "/v1/fingerprint")) else (200, answer(path, body, config))

    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(reply))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_vllm_of_the_same_release_without_drafts_is_drift(project: Path, without_drafts: str) -> None:
    checked = run("check_drift.py", "on-vllm", "--base-url", without_drafts, project=project)
    assert checked.returncode == 1
    assert (
        "0 of 16 answers changed, no difference is tolerated; fingerprint: differs (compared: libraries; could "
        "not be compared: checkpoint, serving, engine, sampling, environment, hardware)\n" in checked.stdout
    )
    assert re.search(r"\n  system_fingerprint: evaluated '\w{12}', the endpoint says 'vllm-0\.32\.0-'", checked.stdout)


@pytest.mark.parametrize(
    ("script", "argv", "said"),
    [
        (
            "check_drift.py",
            ("drafted", "--base-url", "nonsense"),
            "--base-url: expected http://host:port, got 'nonsense'",
        ),
        (
            "check_drift.py",
            ("drafted", "--base-url", "http://127.0.0.1:9", "--cases", "0"),
            "--cases: expected 1 or more, got 0",
        ),
        ("check_drift.py", ("drafted", "--cases", "-3"), "--cases: expected 1 or more, got -3"),
        ("check_drift.py", ("drafted", "--max-changed", "-1"), "--max-changed: expected 0 or more, got -1"),
        (
            "serve.py",
            ("elsewhere",),
            "candidates.elsewhere.engine: expected one that quantgate starts (transformers, vllm)"
            ", got openai, which somebody else serves at http://127.0.0.1:9; start it there",
        ),
        ("serve.py", ("drafted", "--port", "70000"), "--port: expected 1 to 65535, got 70000"),
        ("serve.py", ("nobody",), "candidates: expected one of reference, drafted, on-vllm, elsewhere, got 'nobody'"),
        ("serve.py", ("reference",), "build/agent/candidates/reference/candidate.json: expected"),
    ],
)
def test_what_can_not_be_done_is_one_line(project: Path, script: str, argv: tuple[str, ...], said: str) -> None:
    ended = run(script, *argv, project=project)
    assert ended.returncode == 1 and ended.stdout == ""
    assert said in ended.stderr and ended.stderr.count("\n") == 1
