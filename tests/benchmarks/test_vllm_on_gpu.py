"""The benchmark of vLLM on a GPU: which starts it makes, and what it makes of what it measured."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_on_gpu
from benchmarks.vllm_runs import compare_answers, count_weight_bytes, make_prompts
from pipeline.products.text.serving.answers import Reply
from pipeline.running.weight_files import read_tensors
from tests.fakes.tiny_llama import write_tiny_llama
from tests.paths import ROOT


def arguments_of(folder: Path, **changes: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "checkpoint": folder / "tiny",
        "output": folder / "out",
        "command": [sys.executable, str(ROOT / "tests/fakes/fake_vllm.py"), "serve"],
        "version": "0.32.0",
        "variants": ["bf16", "fp8", "int4"],
        "int4": None,
        "draft": None,
        "speculation": [],
        "dtypes": ["bf16", "fp16"],
        "in_flight": [1, 16],
        "num_tokens": 8,
        "num_prompts": 4,
        "product": None,
        "context_length": 256,
        "tensor_parallel_size": 1,
        "memory": 0.5,
        "options": "{}",
        "no_kernels": False,
        "start_timeout_s": 20.0,
        "limit_s": 60.0,
    }
    return argparse.Namespace(**defaults | changes)


def make_reply(text: str, *ids: int) -> Reply:
    return Reply(
        text=text,
        tool_calls=(),
        finish_reason="length",
        num_prompt_tokens=1,
        num_completion_tokens=len(ids),
        latency_s=0.1,
        fingerprint="",
        token_ids=ids,
        prompt_token_ids=(1,),
    )


def test_answers_are_compared_by_tokens_and_by_kind() -> None:
    first = [make_reply("same", 1, 2), make_reply("a b", 3), make_reply("x", 4)]
    second = [make_reply("same", 1, 2), make_reply("a c", 5), make_reply("x", 6)]
    assert compare_answers(first, second) == {"num_prompts": 3, "num_other_tokens": 2, "kinds": {"prose": 1}}


def test_a_token_reads_one_row_of_an_input_embedding(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    tensors = read_tensors(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    is_tied = "lm_head.weight" not in tensors
    total = sum(t.num_bytes for t in tensors.values())
    saved = 0 if is_tied else embedding.num_bytes * (embedding.shape[0] - 1) / embedding.shape[0]
    assert count_weight_bytes(tmp_path) == total - saved
    linear = [t for name, t in tensors.items() if ".layers." in name and len(t.shape) == 2]
    fewer = sum(t.num_bytes - t.shape[0] * t.shape[1] for t in linear)
    assert count_weight_bytes(tmp_path, linear_bytes=1) == total - saved - fewer


def test_plain_runs_come_before_those_with_drafts(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny")
    runs = vllm_on_gpu.plan_runs(arguments_of(tmp_path, draft=tmp_path / "tiny", speculation=["draft", "ngram"]))
    names = ["bf16", "fp8", "bf16 draft", "bf16 ngram", "fp16", "fp16 draft", "fp16 ngram"]
    assert [run.name for run in runs] == names
    assert {run.plain for run in runs} == {None, "bf16", "fp16"}


def test_prompts_are_no_two_alike() -> None:
    prompts = [prompt[0]["content"] for prompt in make_prompts(40, seed=1)]
    assert len(set(prompts)) == 40 and prompts != [p[0]["content"] for p in make_prompts(40, seed=2)]


def test_a_start_that_fails_costs_its_own_row_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_BREAKS", "1")
    write_tiny_llama(tmp_path / "tiny")
    arguments = arguments_of(tmp_path, variants=["bf16", "fp8"])
    arguments.output.mkdir()
    results = asyncio.run(vllm_on_gpu.run_all(arguments))
    assert [result["name"] for result in results] == ["bf16", "fp8"]
    assert all("no kernel for int4 in float32" in result["failure"] for result in results)
    assert json.loads((arguments.output / "vllm.json").read_text())["runs"] == results
    assert "no kernel for int4" in (arguments.output / "vllm.md").read_text()


def test_the_table_shows_the_share_of_the_bandwidth_at_one_request(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    cell = {"in_flight": 1, "tokens_per_s": 100.0, "ttft_ms": 5.0, "itl_ms": 10.0, "num_requests": 4, "num_as_asked": 4}
    result: dict[str, Any] = {"name": "bf16", "speed": [cell], "gpu_memory_mib": 70016.0, "kernels": {"A": {"B": 1}}}
    weights = count_weight_bytes(tmp_path)
    for num_gpus, share in ((2, 0.25), (1, 0.5)):  # each GPU reads its part
        run = vllm_on_gpu.Run("bf16", tmp_path)
        vllm_on_gpu.add_bandwidth(result, run, weights / 1e9 / 0.01 * 2, num_gpus=num_gpus)
        assert result["bandwidth_share"] == share
    text = vllm_on_gpu.render([result], 3000.0)
    assert "| bf16 | 1 | 100 | 5.0 | 10.00 | 4 of 4 |" in text and "{'A': {'B': 1}}" in text


def test_answers_of_a_product_are_compared_on_the_first_turns_of_its_evals(tmp_path: Path) -> None:
    prompts = vllm_on_gpu.choose_prompts(arguments_of(tmp_path, product="agent", num_prompts=8))
    assert len(prompts) == 8
    assert all(messages[-1]["role"] == "user" for messages in prompts)
