"""What a user sees when a stage is given something it can't use: one line, exit 1, and finished work kept.

Each case runs a stage as `python -m stages.<stage>` would, in this process, and looks at the whole of
stderr. Values that a module refuses by itself are in its own tests; here are the stage, the endpoint
that answers nonsense, lm-eval, and the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import scripts.plan
import stages.benchmark
import stages.compare
import stages.env
import stages.evaluate
import stages.gate
import stages.optimize
import stages.release
import stages.track
from pipeline.products.params import load_params
from pipeline.products.text.serving import sending
from pipeline.records.evaluations import BuiltCandidate, Checkpoint
from pipeline.records.files import write_text
from pipeline.records.likeness import Likeness
from pipeline.records.record_files import read_record, write_record
from stages.cli import run_stage
from tests.fakes.fake_vllm import Answer, make_handler, score
from tests.fakes.tiny_llama import write_documents

ROOT = Path(__file__).resolve().parents[2]
MODEL = "m"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the shipped checkpoint and settings, and small evalsets; the current folder."""
    shutil.copytree(ROOT / "models/agent", tmp_path / "models/agent")
    settings = (ROOT / "params.yaml").read_text(encoding="utf-8")
    # nothing was released here, so that nothing can be looser than then
    write_text(tmp_path / "params.yaml", re.sub(r"      loosened:\n(        .*\n)+", "", settings))
    for name in ("workflows", "tool_calls", "choices", "calibration"):
        shutil.copytree(ROOT / "evalsets" / name, tmp_path / "evalsets" / name)
    # what the other products name is there too, and nothing here changes it
    for name in (
        "evalsets/shots",
        "evalsets/scenes",
        "evalsets/scenes-calibration",
        "evalsets/panoramas",
        *(f"models/product-shots{part}" for part in ("", "-clip", "-hot-vae")),
        "models/people",
        "models/people-hard",
        "models/upscaler",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    write_documents(tmp_path / "evalsets/prose", {"prose": [f"A text about crate {i}." for i in range(40)]})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setattr(sending, "BASE_BACKOFF_S", 0.001)
    return tmp_path


def run(stage: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Run a stage's main as its file would; return the exit code and what quantgate said on stderr."""
    name = stage.__name__.rpartition(".")[2]
    monkeypatch.setattr(sys, "argv", [name, *argv])
    with pytest.raises(SystemExit) as exited:
        run_stage(name, stage.main)
    lines = capsys.readouterr().err.splitlines()
    return int(exited.value.code or 0), "\n".join(line for line in lines if line.startswith(f"quantgate {name}: "))


OPENAI = "    steps: []\n    engine: {kind: openai,"


def edit(path: str, old: str, new: str) -> None:
    """Replace a pattern that occurs in a text file."""
    text = Path(path).read_text(encoding="utf-8")
    changed = re.sub(old, new, text, count=1)
    assert changed != text
    Path(path).write_text(changed, encoding="utf-8")


def leave_pickle_only() -> None:
    Path("models/agent/model.safetensors").rename("models/agent/pytorch_model.bin")


def cut_weights() -> None:
    path = Path("models/agent/model.safetensors")
    path.write_bytes(path.read_bytes()[:100_000])


def overwrite(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)


BAD_PROJECTS: dict[str, tuple[Callable[[], None], str]] = {
    "no-settings": (lambda: Path("params.yaml").unlink(), "params.yaml: expected the settings file, found none"),
    "settings-not-yaml": (
        lambda: edit("params.yaml", r"release: \[awq-long-g32\]", "release: [awq-long"),
        "params.yaml: not valid YAML: line 20: expected ',' or ']'",
    ),
    "settings-in-latin-1": (
        lambda: overwrite("params.yaml", "products:\n  # Größe: é\n".encode() + "  # Grö".encode("latin-1") + b"\n"),
        "params.yaml: not valid YAML: line 3, column 7: not UTF-8: invalid start byte; save the file as UTF-8",
    ),
    "same-candidate-twice": (
        lambda: edit("params.yaml", r"\n  gptq-short:", "\n  agent: {}\n  gptq-short:"),
        ': found duplicate key "agent"',  # behind the line's number
    ),
    "unknown-key": (
        lambda: edit("params.yaml", r"\n      dtype:", "\n      dtpye:"),
        "params.yaml: products.agent.serving.dtpye: unknown key; remove it or correct its spelling",
    ),
    "missing-key": (
        lambda: edit("params.yaml", r"\n      dtype: \w+", "\n"),
        "params.yaml: products.agent.serving.dtype: expected this key, found none",
    ),
    "wrong-type": (
        lambda: edit("params.yaml", "concurrency: 256", "concurrency: many"),
        "products.agent.serving.concurrency: expected a whole number, got 'many'",
    ),
    "released-twice": (
        lambda: edit("params.yaml", r"\[awq-long-g32\]", "[awq-long, awq-long]"),
        "products.agent.release.1: 'awq-long' is listed twice",
    ),
    "impossible-port": (
        lambda: edit("params.yaml", r"    steps: \[\]", f"{OPENAI} base_url: 'http://localhost:99999', model: m}}"),
        "candidates.agent.engine.base_url: expected http://host:port, got 'http://localhost:99999'",
    ),
    "no-host": (
        lambda: edit("params.yaml", r"    steps: \[\]", f"{OPENAI} base_url: 'http://', model: m}}"),
        "candidates.agent.engine.base_url: expected http://host:port, got 'http://'",
    ),
    "no-checkpoint": (lambda: shutil.rmtree("models/agent"), "candidates.agent.checkpoint: expected a checkpoint"),
    "pickle-weights": (leave_pickle_only, "found pickle weights 'pytorch_model.bin', which run code when opened"),
    "truncated-weights": (cut_weights, "model.safetensors: its header promises"),
    "card-not-utf8": (
        lambda: overwrite("evalsets/prose/card.yaml", b"name: \xff"),
        "evalsets/prose/card.yaml: not valid YAML: 'utf-8' codec can't decode byte 0xff",
    ),
}


@pytest.mark.parametrize(("damage", "said"), BAD_PROJECTS.values(), ids=BAD_PROJECTS.keys())
def test_env_refuses_in_one_line_before_any_work(
    project: Path,
    damage: Callable[[], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage()
    code, line = run(stages.env, monkeypatch, capsys)
    assert (code, line.count("\n")) == (1, 0)
    assert said in line
    assert not Path("build").exists()


@pytest.mark.parametrize("damage", [cut_weights, lambda: overwrite("evalsets/prose/cases.jsonl", b"{}\n")])
def test_a_plan_finds_what_env_finds(
    project: Path, damage: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make plan` printed its tables for weights that no run could load."""
    damage()
    found = [run(stage, monkeypatch, capsys) for stage in (stages.env, scripts.plan)]
    assert [code for code, _ in found] == [1, 1]
    assert found[0][1].partition(": ")[2] == found[1][1].partition(": ")[2] != ""


def test_a_plan_shows_the_other_tolerances_beside_one_that_no_candidate_proves(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stage `env` stops at the first, but what the cases can prove is what a plan is asked for."""
    edit(
        "params.yaml",
        r"workflows/task_completion_rate:\n( +)overall: [\d.]+",
        r"workflows/task_completion_rate:\n\1overall: 0.002",
    )
    monkeypatch.setattr(sys, "argv", ["plan", "agent"])
    with pytest.raises(SystemExit) as exited:
        run_stage("plan", scripts.plan.main)
    shown = capsys.readouterr()
    assert exited.value.code == 1
    assert "choices/accuracy" in shown.out
    assert "quantgate plan: products.agent.gate.tolerances.workflows/task_completion_rate.overall: " in shown.err


def test_what_the_system_refuses_is_one_line_too(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overwrite("build", b"a file where a folder must be")
    code, line = run(stages.env, monkeypatch, capsys)
    assert code == 1
    assert "build" in line and "finished work is kept, run `dvc repro` to go on" in line


def test_a_place_for_bytecode_that_can_t_be_looked_at_stops_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python itself goes on without; what is told is what is wrong."""
    cut_weights()
    monkeypatch.setattr(sys, "pycache_prefix", f"/tmp/{'x' * 300}")
    code, line = run(stages.env, monkeypatch, capsys)
    assert code == 1 and "model.safetensors: its header promises" in line


# An endpoint of vLLM's kind, and the ways in which one goes wrong.


def answer_well(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    if path == "/v1/models":
        return 200, {"data": [{"id": MODEL}]}
    if path == "/tokenize":
        return 200, {"tokens": [[0] if text.startswith("<|") else [5, 6, 7, 8] for text in body["prompt"]]}
    return 200, score(body)


def instead(path: str, status: int, value: Any) -> Answer:
    """Answer well but for one path."""
    return lambda asked, body: (status, value) if asked == path else answer_well(asked, body)


def spoil(change: Callable[[dict[str, Any]], None]) -> Answer:
    """Answer well, with every sequence's logprobs changed."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, value = answer_well(path, body)
        for choice in value.get("choices", ()):
            change(choice["logprobs"])
        return status, value

    return answer


def refuse_after_the_probe(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    if path == "/v1/completions" and body["prompt"] != [[0, 1, 2]]:
        return 400, {"error": {"message": "not today"}}
    return answer_well(path, body)


def to_nulls(logprobs: dict[str, Any]) -> None:
    logprobs["token_logprobs"] = [None for _ in logprobs["token_logprobs"]]


def to_lists(logprobs: dict[str, Any]) -> None:
    logprobs["top_logprobs"] = [row and list(row) for row in logprobs["top_logprobs"]]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start HTTP servers that answer as told; return the URL of each."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), make_handler(answer)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def attach(url: str, evals: dict[str, Any]) -> None:
    """Write settings and a record for one candidate that is served at `url`."""
    params = YAML(typ="safe").load(Path("params.yaml").read_text(encoding="utf-8"))
    product = params["products"]["agent"]
    metric = "e/accuracy" if evals["e"]["kind"] == "harness" else "e/perplexity_per_token"
    params["products"]["agent"] = product | {
        "reference": "agent",
        "release": ["there"],
        "evals": evals,
        "gate": product["gate"] | {"tolerances": {metric: {"overall": 0.1}}, "tripwires": {}},
        "benchmark": product["benchmark"] | {"candidates": []},
    }
    params["candidates"]["there"] = params["candidates"]["agent"] | {
        "engine": {"kind": "openai", "base_url": url, "model": MODEL}
    }
    Path("params.yaml").write_text(json.dumps(params), encoding="utf-8")  # JSON is YAML
    checkpoint = Checkpoint(
        path="models/agent", kind="llama", format="dense", dtype="bfloat16", num_parameters=1, num_bytes=1, digest="d"
    )
    write_record(
        Path("build/agent/candidates/there/candidate.json"), BuiltCandidate(name="there", checkpoint=checkpoint)
    )


PERPLEXITY = {"e": {"kind": "perplexity", "evalset": "evalsets/prose"}}
BAD_ENDPOINTS: dict[str, tuple[Answer, str]] = {
    "a-web-page": (instead("/v1/models", 200, b"<html>"), "/v1/models: expected JSON, got '<html>' .tried 5 times"),
    "no-list-of-models": (
        instead("/v1/models", 200, ["m"]),
        r"""/v1/models: expected a list of models, got '\["m"\]'""",
    ),
    "another-model": (
        instead("/v1/models", 200, {"data": [{"id": "other"}]}),
        r"expected 'm' among the served models, got \['other'\]",
    ),
    "no-scores": (instead("/v1/completions", 200, {"hello": 1}), "expected echoed logprobs, got '{\"hello\":1}'"),
    "scores-null": (spoil(to_nulls), "expected echoed logprobs of 3 tokens, got log-probabilities that are no"),
    "top-scores-a-list": (spoil(to_lists), 'expected echoed logprobs of 3 tokens, got \'{"token_logprobs":'),
    "no-tokens": (
        instead("/tokenize", 200, {"ids": [1]}),
        '/tokenize: expected token ids for each text .*, got \'{"ids":',
    ),
    "too-few-tokens": (instead("/tokenize", 200, {"tokens": [[1]]}), "/tokenize: expected .* for each text .40 sent."),
    "refuses-everything": (instead("/v1/models", 400, {"error": "no"}), "/v1/models: HTTP 400: no"),
    "refuses-every-case": (refuse_after_the_probe, "e: 8 cases in a row failed, last: .*HTTP 400: not today"),
}


@pytest.mark.parametrize(("answer", "said"), BAD_ENDPOINTS.values(), ids=BAD_ENDPOINTS.keys())
def test_an_endpoint_that_answers_nonsense_ends_the_stage_in_one_line(
    project: Path,
    serve: Callable[[Answer], str],
    answer: Answer,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attach(serve(answer), PERPLEXITY)
    code, line = run(stages.evaluate, monkeypatch, capsys, "there")
    assert (code, line.count("\n")) == (1, 0)
    assert re.search(said, line)
    assert not Path("build/agent/evaluations/there").exists()


def test_an_endpoint_that_is_not_there_is_one_line(
    project: Path, serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attach("http://127.0.0.1:9", PERPLEXITY)
    code, line = run(stages.evaluate, monkeypatch, capsys, "there")
    assert code == 1
    assert "http://127.0.0.1:9/v1/models: no connection: " in line
    assert "start it, or correct candidates.there.engine.base_url" in line


def test_results_that_can_not_be_written_are_refused_before_the_endpoint_is_asked(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole evaluation was asked, and then the last one could not make way."""
    attach("http://127.0.0.1:9", PERPLEXITY)  # where nobody answers
    last = Path("build/agent/evaluations/there")
    last.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != last)  # rights do not bind root
    code, line = run(stages.evaluate, monkeypatch, capsys, "there")
    assert (code, line.count("\n")) == (1, 0)
    assert f"{last}: expected a folder that user {os.getuid()} may write to, got no permission" in line


@pytest.mark.parametrize("place", ["shards", "shards/there", "shards/there/1-of-8"])
def test_a_shard_that_can_not_be_written_is_refused_before_the_endpoint_is_asked(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """Its server was started first, and the line named neither what was expected nor what to do."""
    attach("http://127.0.0.1:9", PERPLEXITY)  # where nobody answers
    path = Path("build/agent") / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    code, line = run(stages.evaluate, monkeypatch, capsys, "there", "--shard", "1/8")
    assert code == 1
    assert line == f"quantgate evaluate: {path}: expected a folder for results, got a file; move it away"


BAD_TASKS: dict[str, tuple[str, str, str]] = {
    "unknown": ("task: choices", "task: chioces", "lm-eval knows no task 'choices' .evalsets/choices: chioces"),
    "not-yaml": ("task: choices", "task: [choices", "knows no task 'choices' .*: no file there is the valid YAML"),
    "unknown-field": ("{{question}}", "{{no.such}}", "lm-eval can't load 'choices': UndefinedError: 'no' is undefined"),
    "no-data": ("cases.jsonl", "gone.jsonl", "lm-eval can't load 'choices': FileNotFoundError: "),
}


@pytest.mark.parametrize(("old", "new", "said"), BAD_TASKS.values(), ids=BAD_TASKS.keys())
def test_a_task_that_lm_eval_can_not_run_is_one_line(
    project: Path,
    serve: Callable[[Answer], str],
    old: str,
    new: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attach(serve(answer_well), {"e": {"kind": "harness", "task": "choices", "include_path": "evalsets/choices"}})
    edit("evalsets/choices/choices.yaml", re.escape(old), new)
    code, line = run(stages.evaluate, monkeypatch, capsys, "there")
    assert (code, line.count("\n")) == (1, 0)
    assert re.search(f"evals.e.task: .*{said}", line)


def test_results_of_candidates_that_are_timed_no_more_are_removed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output persists, and compare would judge them; with nobody to time, it still needs their folder."""
    folder = project / "build/agent/benchmarks"
    for name in ("awq-long-g32", "gone"):
        write_text(folder / f"{name}.json", "{}")
    code, line = run(stages.benchmark, monkeypatch, capsys, "agent")
    assert (code, line.count("\n")) == (1, 0) and "build/agent/candidates/agent/candidate.json" in line
    assert [path.name for path in folder.iterdir()] == ["awq-long-g32.json"]
    edit("params.yaml", r"  candidates: \[awq-long-g32\]", "  candidates: []")
    assert stages.benchmark.main(["agent"]) == 0
    assert [path.name for path in folder.iterdir()] == ["nothing.txt"]
    shutil.rmtree(folder)
    for product in ("agent", "people", "upscaler"):
        assert stages.benchmark.main([product]) == 0
        [note] = (
            project / "build" / product / "benchmarks"
        ).iterdir()  # DVC warned of an empty folder nine times a run
        assert note.read_text() == f"Nothing of {product} is measured side by side.\n"


def test_pictures_that_are_not_there_are_refused_candidate_by_candidate(project: Path) -> None:
    for name in ("gone.json", "nothing.txt"):
        write_text(project / "build/shots/benchmarks" / name, "{}")
    assert stages.benchmark.main(["shots"]) == 0
    written = [read_record(path, Likeness) for path in (project / "build/shots/benchmarks").iterdir()]
    assert {one.name for one in written} == set(load_params().products["shots"].candidates) - {"shots"}
    assert all(one.refusal and not one.evals for one in written)


STAGES_OF_A_CANDIDATE = (stages.optimize, stages.evaluate)
STAGES_OF_A_PRODUCT = (stages.benchmark, stages.compare, stages.gate, stages.release, stages.track)


@pytest.mark.parametrize("stage", [*STAGES_OF_A_CANDIDATE, *STAGES_OF_A_PRODUCT], ids=lambda stage: stage.__name__)
def test_a_stage_is_given_one_name_that_is_in_the_settings(
    project: Path, stage: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = "candidate" if stage in STAGES_OF_A_CANDIDATE else "product"
    known = (
        "candidates: expected one of agent, agent-again, "
        if what == "candidate"
        else ("products: expected agent or shots or people or upscaler, got")
    )
    for argv, said in (
        ((), f"expected the name of one {what}, got ''"),
        (("agent", "shots"), f"expected the name of one {what}, got 'agent shots'"),
        (("none",), known),
    ):
        code, line = run(stage, monkeypatch, capsys, *argv)
        assert (code, line.count("\n")) == (1, 0) and said in line, line
    assert not Path("build").exists()
