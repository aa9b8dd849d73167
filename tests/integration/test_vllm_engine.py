"""vLLM as an engine that is started by a command: a stand-in for it, so that no vLLM is needed.

That the real one takes the same configuration and answers is a manual check, in benchmarks/README.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineError, QuantgateError
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.engine import Engine
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.settings import EvalSettings, PerplexityEval, ToolCallsEval, VllmEngine
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculativeConfig
from tests.fakes.fake_vllm import TOKENS
from tests.fakes.processes import wait_for_end
from tests.fakes.tiny_llama import write_tiny_llama
from tests.integration.test_serving import ROOT, SETTINGS

COMMAND = (sys.executable, str(ROOT / "tests/fakes/fake_vllm.py"), "serve")
EVALS: dict[str, EvalSettings] = {
    "prose": PerplexityEval(kind="perplexity", evalset="e"),
    "calls": ToolCallsEval(kind="tool_calls", evalset="e"),
}
DRAFT = SpeculativeConfig(method="prompt_lookup", num_tokens=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    write_tiny_llama(folder / "tiny")
    return folder


def make_candidate(root: Path, **changes: Any) -> Candidate:
    serving: dict[str, Any] = {"engine": "vllm", "command": COMMAND, "version": "0.32.0", "context_length": 256}
    checkpoint = read_checkpoint(root / "tiny", root=root)
    return Candidate(name="tiny", checkpoint=checkpoint, serving=ServingConfig(**serving | changes))


def with_engine(candidate: Candidate, root: Path, look: Callable[[Engine, Client], Any], **limits: Any) -> Any:
    async def run() -> Any:
        settings = SETTINGS.model_copy(update=limits)
        async with start_engine(candidate, settings, evals=EVALS, root=root, logs=root / "logs") as (engine, client):
            return await look(engine, client)

    return asyncio.run(run())


def test_a_started_vllm_is_asked_and_says_what_it_is(root: Path) -> None:
    candidate = make_candidate(root, speculative=DRAFT, environment={"VLLM_CPU_KVCACHE_SPACE": "1"})

    async def look(engine: Engine, client: Client) -> tuple[Engine, Any]:
        return engine, await client.chat([{"role": "user", "content": "x"}], max_tokens=4, return_token_ids=True)

    engine, reply = with_engine(candidate, root, look)
    assert reply.token_ids == tuple(TOKENS) and reply.fingerprint == candidate.fingerprint == engine.echo
    assert engine.facts["libraries"] == {"vllm": "0.32.0"} and engine.facts["engine"]["cache_config.block_size"] == 128
    assert engine.facts["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "1"
    counts = reply.speculation
    assert (counts.num_target_forwards, counts.num_drafted, counts.accepted_by_position) == (2, 2, (1, 0))
    assert 'speculative-config: {"method": "ngram", "num_speculative_tokens": 2}' in engine.config["vllm.yaml"]
    assert engine.processes[0].popen.returncode is not None, "it is stopped"


def test_its_workers_say_which_kernels_they_dispatched(root: Path) -> None:
    """The file of theirs is found where the command keeps PYTHONPATH."""

    async def look(engine: Engine, client: Client) -> dict[str, Any]:
        assert (await client.get_text("/metrics")).endswith("vllm:generation_tokens_total 3.0\n")
        return engine.facts

    engine = VllmEngine(
        kind="vllm", command=list(COMMAND), version="0.32.0", tensor_parallel_size=2, report_kernels=True
    )
    facts = with_engine(make_candidate(root, **engine.build_serving()), root, look)
    assert facts["engine"]["kernels"] == {"QKVParallelLinear": {"CompressedTensorsWNA16 MacheteLinearKernel": 2}}
    assert facts["serving"]["options"]["tensor-parallel-size"] == 2


async def not_asked(engine: Engine, client: Client) -> None:
    raise AssertionError("must not come up")


@pytest.mark.parametrize(
    ("changes", "limits", "said"),
    [
        pytest.param(
            {"environment": {"FAKE_VLLM_BREAKS": "1"}},
            {},
            "exited with code 1: ValueError: no kernel for int4 in float32",
            id="root-cause",
        ),
        pytest.param(
            {"environment": {"FAKE_VLLM_SLEEPS": "1"}},
            {"start_timeout_s": 0.5},
            "not ready after 0.5 s",
            id="never-ready",
        ),
        pytest.param(
            {"version": "0.31.0"},
            {},
            "libraries.vllm: the candidate says '0.31.0', the server loaded '0.32.0'",
            id="another-release",
        ),
        pytest.param(
            {"environment": {"FAKE_VLLM_DTYPE": "torch.bfloat16"}},
            {},
            "serving.dtype: the candidate says 'float32', the server loaded 'bfloat16'",
            id="another-dtype",
        ),
        pytest.param(
            {"environment": {"FAKE_VLLM_TP": "2"}},
            {},
            "serving.options.tensor-parallel-size: the candidate says 'nothing', the server loaded 2",
            id="another-size",
        ),
        pytest.param(
            {"command": ("/nowhere/vllm", "serve")}, {}, "No such file or directory: '/nowhere/vllm'", id="no-program"
        ),
        pytest.param(
            {"options": {"enforce_eager": True}}, {}, "vLLM 0.32.0 does not take options", id="unknown-option"
        ),
    ],
)
def test_what_goes_wrong_at_the_start_is_one_line(root: Path, changes: Any, limits: Any, said: str) -> None:
    with pytest.raises(QuantgateError) as caught:
        with_engine(make_candidate(root, **changes), root, not_asked, **limits)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_vllm_that_dies_is_noticed_at_once_and_its_child_goes_too(root: Path) -> None:
    note = root / "child.pid"

    async def look(engine: Engine, client: Client) -> None:
        keeper = engine.processes[0].popen.pid
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(keeper)], capture_output=True, text=True).stdout
        os.kill(int(children.split()[0]), signal.SIGKILL)
        await client.chat([{"role": "user", "content": "x"}], max_tokens=4)

    with pytest.raises(EngineError, match="server server-0: (exited with code|killed by signal)"):
        with_engine(make_candidate(root, environment={"FAKE_VLLM_CHILD": str(note)}), root, look)
    assert wait_for_end(int(note.read_text()))


def test_a_server_goes_with_its_keeper(root: Path) -> None:
    async def look(engine: Engine, client: Client) -> None:
        keeper = engine.processes[0].popen.pid
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(keeper)], capture_output=True, text=True).stdout
        os.kill(keeper, signal.SIGKILL)
        assert wait_for_end(int(children.split()[0]))

    with_engine(make_candidate(root), root, look)


def test_what_runs_before_vllm_belongs_to_the_fingerprint(root: Path) -> None:
    """A wrapper may set what it likes; moving it changes nothing."""

    async def fingerprint(engine: Engine, client: Client) -> str:
        return engine.fingerprint

    def wrapped(folder: str, line: str) -> str:
        script = root / folder / "wrap.sh"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/bash\n{line}\nexec "$@"\n')
        command = ("bash", str(script), *make_candidate(root).serving.command)
        return with_engine(make_candidate(root, command=command), root, fingerprint)

    plain = with_engine(make_candidate(root), root, fingerprint)
    first = wrapped("a", "export X=1")
    assert len({plain, first, wrapped("a", "export X=2")}) == 3
    assert wrapped("b", "export X=1") == first


PARENT = """
import asyncio, signal, sys
from pathlib import Path
from pipeline.records.evaluations import Candidate
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.settings import ResourceSettings
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
async def run(candidate, settings, root):
    async with start_engine(candidate, settings, evals={}, root=root, logs=root / "logs"):
        print("ready", flush=True)
        await asyncio.sleep(600)
asyncio.run(run(Candidate.model_validate_json(sys.argv[1]), ResourceSettings.model_validate_json(sys.argv[2]),
                Path(sys.argv[3])))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
def test_nothing_is_left_running_when_we_end(root: Path, number: signal.Signals) -> None:
    note = root / f"child-{number}.pid"
    candidate = make_candidate(root, environment={"FAKE_VLLM_CHILD": str(note)})
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, candidate.model_dump_json(), SETTINGS.model_dump_json(), str(root)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
    parent.send_signal(number)
    parent.wait(timeout=120)
    assert wait_for_end(int(note.read_text()))
