"""A model without a chat template through the whole path: tasks answered in words, canary, drafts and speed.

Its answers are those of lm-eval's own `hf` model.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lm_eval import utils
from tokenizers.processors import TemplateProcessing

from pipeline.errors import SettingsError
from pipeline.products.text.benchmark import matched_work
from pipeline.products.text.benchmark.matched_work import run_benchmark
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.evals.evaluate import evaluate_candidate
from pipeline.products.text.evals.material import index_tasks, read_fresh
from pipeline.products.text.model_loading import load_model, load_tokenizer
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import HarnessEval, TextProduct
from pipeline.records.evaluations import BuiltCandidate, CaseRecord, Evaluation, format_cut, read_cases
from pipeline.records.record_files import write_record
from pipeline.records.speculation import SpeculativeConfig
from tests.fakes.synthetic_records import make_params
from tests.fakes.tiny_llama import SPECIAL_TOKENS, write_tiny_llama
from tests.integration.test_serving import WORDS

NUM_DOCUMENTS, MAX_TOKENS, CONTEXT = 64, 24, 96
STEP = {"kind": "speculative", "method": "prompt_lookup", "num_speculative_tokens": 3}
TASK = HarnessEval(kind="harness", task="mine", include_path="tasks")


def write_base_model(folder: Path) -> Path:
    """Write a model without a chat template that writes ASCII and never ends; its tokenizer puts BOS before a text."""
    write_tiny_llama(folder)
    model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    with torch.no_grad():
        for i, text in enumerate(texts):
            model.lm_head.weight[i] *= text.isascii() and text.isprintable() and text not in SPECIAL_TOKENS
    model.save_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def write_task(folder: Path, *, num_documents: int = NUM_DOCUMENTS, **options: Any) -> None:
    """Write a task that is answered in words, up to a stop string."""
    cases = [
        {"id": f"q{i}", "text": f"{i} {WORDS[i % 7]} {WORDS[i % 5]} {i * i}", "target": "no"}
        for i in range(num_documents)
    ]
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "cases.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["e", "1 "], "do_sample": False} | options,
        "filter_list": [
            {"name": "first", "filter": [{"function": "regex", "regex_pattern": "([a-z])"}, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match"}],
    }
    folder.mkdir(exist_ok=True)
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    (folder / "mine.yaml").write_text(json.dumps(task))  # JSON is YAML


def make_product(root: Path) -> TextProduct:
    data = make_params(["drafts"], ["drafts"]).model_dump()
    data["evals"] = {"mine": TASK.model_dump()}
    data["candidates"] = {
        "reference": {"checkpoint": "base", "steps": []},
        "drafts": {"checkpoint": "base", "steps": [STEP]},
    }
    data["gate"] |= {"tolerances": {"mine/accuracy": {"overall": 0.1}}, "tripwires": {}}
    data["serving"] |= {"context_length": CONTEXT, "max_tokens": MAX_TOKENS, "concurrency": 8}
    data["resources"] |= {"num_servers": 1, "start_timeout_s": 300}
    data["canary"] |= {"num_prompts": 8}
    data["benchmark"] |= {
        "candidates": ["drafts"], "concurrency": [2], "prompt_tokens": [[1, 64]], "num_tokens": 8,
    }  # fmt: skip
    return TextProduct.model_validate(data)


def evaluate(root: Path, product: TextProduct, name: str) -> Evaluation:
    step = product.candidates[name].speculative
    built = BuiltCandidate(
        name=name,
        checkpoint=read_checkpoint(root / "base", root=root),
        steps=(step.build_record(),) if step else (),
        speculative=SpeculativeConfig(method="prompt_lookup", num_tokens=3) if step else None,
        libraries={"safetensors": importlib.metadata.version("safetensors")},
    )
    build = root / "build"
    write_record(build / "candidates" / name / "candidate.json", built)
    return asyncio.run(evaluate_candidate(read_candidate(build, name, product), product, root=root, build=build))


def read_records(root: Path, name: str) -> list[CaseRecord]:
    return read_cases(root / "build/evaluations" / name / "mine.jsonl")


def run_hf(folder: Path) -> list[dict[str, Any]]:
    """Return the samples of lm-eval's own model."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    with read_fresh():
        results = evaluator.simple_evaluate(
            model=model,
            tasks=["mine"],
            task_manager=index_tasks("mine", TASK),
            log_samples=True,
            bootstrap_iters=0,
            gen_kwargs={"max_gen_toks": MAX_TOKENS},
        )
    return results["samples"]["mine"]


@pytest.mark.slow
def test_a_base_model_is_asked_by_plain_prompts_from_tasks_to_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_base_model(tmp_path / "base")
    write_task(tmp_path / "tasks")
    product = make_product(tmp_path)
    compile_template = mock.Mock(side_effect=utils.env.from_string)
    monkeypatch.setattr(utils.env, "from_string", compile_template)
    evaluation = evaluate(tmp_path, product, "reference")
    printed = capsys.readouterr().err
    templates = ["{{text}}", "{{target}}"]
    assert sorted(call.args[0] for call in compile_template.call_args_list) == sorted(2 * templates), "to load, to ask"
    records = read_records(tmp_path, "reference")
    samples = run_hf(tmp_path / "base")
    assert len(records) == len(samples) == NUM_DOCUMENTS
    for record, sample in zip(records, samples, strict=True):
        assert record.prompt == sample["arguments"][0][0]
        assert (record.answer or record.output) == sample["resps"][0][0]
        assert (record.output, record.scores["accuracy"]) == (sample["filtered_resps"][0], sample["exact_match"])
    num_cut = sum(bool(record.cut_by) for record in records)
    assert 0 < num_cut < NUM_DOCUMENTS, "nothing is tested where all or none end by a stop string"
    assert all((r.num_completion_tokens == MAX_TOKENS) >= bool(r.cut_by) for r in records)
    assert format_cut(records) == f"{num_cut} of {NUM_DOCUMENTS} answers cut by serving.max_tokens"
    assert f"{num_cut} of {NUM_DOCUMENTS} answers cut by serving.max_tokens" in printed
    assert evaluation.canary is not None and (evaluation.canary.num_prompts, evaluation.canary.num_unstable) == (8, 0)

    drafted = evaluate(tmp_path, product, "drafts")
    others = read_records(tmp_path, "drafts")
    assert [(r.answer, r.output, r.scores) for r in others] == [(r.answer, r.output, r.scores) for r in records]
    assert drafted.speculation is not None and drafted.speculation.num_drafted > 0
    assert sum(r.num_completion_tokens for r in others) == drafted.speculation.num_completion_tokens
    assert drafted.canary is not None and drafted.canary.behaviour["plain loaded"] == drafted.canary.behaviour["loaded"]

    # a busy machine may make it look as if a server knew the prompts
    monkeypatch.setattr(matched_work, "find_prefix_cache_hits", lambda *_, **__: None)
    benchmark = asyncio.run(run_benchmark("drafts", product, root=tmp_path, build=tmp_path / "build"))
    assert benchmark.refusal is None, benchmark.refusal
    assert benchmark.cells and benchmark.candidate is not None and benchmark.candidate.num_changed == 0


@pytest.mark.slow
def test_prompts_that_are_too_long_are_named_before_any_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_base_model(tmp_path / "base")
    write_task(tmp_path / "tasks", num_documents=4)
    lines = (tmp_path / "tasks/cases.jsonl").read_text().splitlines()
    tokenizer = load_tokenizer(tmp_path / "base")
    long = "a" + " 7" * CONTEXT
    while len(ids := tokenizer(long)["input_ids"]) > CONTEXT - MAX_TOKENS + 1:
        long = long[:-1]
    assert len(ids) == CONTEXT - MAX_TOKENS + 1, "one token too long, BOS among them"
    lines[2] = json.dumps({"id": "long", "text": long, "target": "no"})
    (tmp_path / "tasks/cases.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(
        SettingsError,
        match=f"evals.mine: 1 of 4 prompts are too long, first that of case 'long': {len(ids)} tokens, which with "
        f"serving.max_tokens {MAX_TOKENS} are above serving.context_length {CONTEXT}; raise the length, lower "
        "serving.max_tokens, or shorten the cases",
    ):
        evaluate(tmp_path, make_product(tmp_path), "reference")
    journal = tmp_path / "build/journal/reference/mine.jsonl"
    assert not journal.exists() or not journal.read_text().count("text")
