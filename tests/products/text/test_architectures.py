"""Models as they come: read from headers, loaded, served and scored as plain transformers does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import EngineError, QuantizationError
from pipeline.products.text.checkpoints import layer_shapes, open_checkpoint, read_checkpoint, tied_head
from pipeline.products.text.model_loading import estimate_load_bytes, load_model
from pipeline.products.text.optimize.layers import check_source, plan_folder
from pipeline.products.text.serving import paged_attention
from pipeline.products.text.serving.app import Server
from pipeline.products.text.serving.loading import LoadedModel, load_candidate
from pipeline.products.text.serving.scoring import score_sequences
from pipeline.products.text.step_settings import Calibration, QuantizeStep
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from tests.fakes.tiny_architectures import ARCHITECTURES, EXPERTS, WINDOWS, write_tiny_model

NUM_TOKENS = 8  # of the server's own probe
CALIBRATION = Calibration(sources=["prose"], num_samples=8, max_tokens=64, length_exponent=0)
# several windows long, so that a token beyond one is far away; some share their first
PROMPTS = [[10 + (i * 7 * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 5)]
PREFIX = [10 + (i * 13) % 200 for i in range(40)]
CHOICES = [PREFIX + [15 + k, 16, 17 + k, 18] for k in range(3)]


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name != "gpt-oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder)


def load(folder: Path) -> LoadedModel:
    serving = ServingConfig(concurrency=4, context_length=96, max_tokens=16, num_threads=1)
    checkpoint = read_checkpoint(folder, root=folder.parent)
    return load_candidate(Candidate(name="tiny", checkpoint=checkpoint, serving=serving), folder)


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    server = Server(loaded)
    yield server
    server._manager.stop()


def test_headers_tell_what_is_in_memory(folder: Path) -> None:
    """Of experts too, which a file holds one by one and memory in one tensor."""
    model = load_model(folder, dtype="auto")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    checkpoint = read_checkpoint(folder, root=folder.parent)
    assert (checkpoint.num_parameters, checkpoint.dtype) == (num_parameters, "float32")
    assert estimate_load_bytes(folder, dtype="bfloat16") == 2 * num_parameters
    head = model.get_output_embeddings()
    assert (tied_head(folder) == "lm_head") == (head.weight is model.get_input_embeddings().weight)


def test_linear_layers_are_those_of_the_model_or_the_step_is_refused_by_name(folder: Path) -> None:
    """A plan of layers that the quantiser would not find must not be made."""
    if folder.name in EXPERTS:
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        with pytest.raises(QuantizationError, match=f"expected a model without experts, got model type '{kind}'"):
            plan_folder(folder, QuantizeStep(kind="gptq", group_size=16, calibration=CALIBRATION))
        return
    check_source(folder)
    modules = load_model(folder, dtype="float32").named_modules()
    linear = {name: tuple(m.weight.shape) for name, m in modules if isinstance(m, torch.nn.Linear)}
    assert layer_shapes(folder) == linear


def test_answers_are_those_of_plain_greedy_generation(server: Server, loaded: LoadedModel) -> None:
    async def ask() -> list[list[int]]:
        await server.probe()
        return await asyncio.gather(*(server._generate(prompt, f"asked-{i}") for i, prompt in enumerate(PROMPTS)))

    assert asyncio.run(ask()) == [_generate_plainly(loaded.scorer, prompt) for prompt in PROMPTS]


def test_only_full_attention_goes_request_by_request(loaded: LoadedModel, folder: Path) -> None:
    """That of quantgate looks at the whole past: a window would be dropped without a word."""
    assert paged_attention.supports(loaded.scorer.config) == (folder.name not in WINDOWS)


def test_choices_that_share_their_text_are_scored_as_alone(loaded: LoadedModel) -> None:
    """One mask for all layers would let those with a window see beyond it."""
    for ids, scores in zip(CHOICES, score_sequences(loaded.scorer, CHOICES, num_top=2), strict=True):
        with torch.inference_mode():
            logprobs = loaded.scorer(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(scores.token_logprobs), expected, rtol=0, atol=1e-5)


def _generate_plainly(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS)
    return [int(token) for token in answer[0, len(prompt) :]]


def test_a_composite_model_has_the_windows_of_its_text(tmp_path: Path) -> None:
    """Its own config has neither layers nor a window."""
    import transformers

    text = transformers.Gemma3TextConfig(sliding_window=16)
    assert not paged_attention.supports(transformers.Gemma3Config(text_config=text.to_dict()))


def test_a_bfloat16_mixture_loads_as_it_is_stored(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mixtral", "mixtral", dtype="bfloat16")
    assert {info.dtype for info in open_checkpoint(folder).values()} == {"BF16"}
    assert {parameter.dtype for parameter in load_model(folder, dtype="auto").parameters()} == {torch.bfloat16}


def test_a_model_without_the_attention_is_one_line(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "gpt-oss", "gpt-oss")
    with pytest.raises(EngineError, match="expected a model that transformers can run with sdpa attention, got GptOss"):
        load(folder)
