"""Attention over packed requests, with plain attention in place of the GPU's kernel."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from pipeline.products.text.model_loading import load_model
from pipeline.products.text.serving import varlen_attention
from tests.fakes.tiny_llama import write_tiny_llama


def make_model(**heads: Any) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, config=LlamaConfig(**heads))


def run_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: Any, longest: Any, *, scaling: float | None
) -> torch.Tensor:
    """Stand for the kernel: the same arguments, any device."""
    lengths = [[int(n) for n in each] for each in starts]
    assert longest == tuple(max(end - start for start, end in pairwise(each)) for each in lengths)
    return varlen_attention.attend_plainly(query, key, value, (lengths[0], lengths[1]))


def test_each_request_attends_to_its_own_keys_up_to_the_query() -> None:
    query, key, value = (torch.randn(n, heads, 8) for n, heads in ((4, 4), (9, 2), (9, 2)))
    output = varlen_attention.attend_plainly(query, key, value, ([0, 1, 4], [0, 5, 9]))
    for row, keys in ((0, slice(0, 5)), (1, slice(5, 7)), (2, slice(5, 8)), (3, slice(5, 9))):
        expected = scaled_dot_product_attention(
            query[row].unsqueeze(1), *(t[keys].transpose(0, 1).repeat_interleave(2, 0) for t in (key, value))
        )
        assert torch.allclose(output[row], expected[:, 0], atol=1e-6)


def test_continuous_batching_with_it_answers_as_plain_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    monkeypatch.setattr(varlen_attention, "attend_packed", run_plainly)
    torch.set_num_threads(1)
    model = load_model(write_tiny_llama(tmp_path / "tiny"), dtype="float32")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(9, 60, (n,), generator=generator).tolist() for n in (5, 40, 23, 70)]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    varlen_attention.register()
    model.set_attn_implementation(varlen_attention.NAME)
    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=model.generation_config.eos_token_id
        ),
        # fewer tokens a batch than there are of prompts: some are computed in parts
        continuous_batching_config=ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=32),
    )
    assert [output.generated_tokens for output in answers.values()] == expected


@pytest.mark.parametrize("error", [RuntimeError, TypeError, AttributeError])
def test_a_build_without_the_kernel_keeps_the_librarys_attention(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    model = make_model()
    monkeypatch.setattr(varlen_attention, "attend_packed", run_plainly)
    assert varlen_attention.is_right(model)
    monkeypatch.setattr(varlen_attention, "attend_packed", fail)
    assert not varlen_attention.is_right(model)


@pytest.mark.parametrize(
    "text", ["CUDA out of memory. Tried to allocate 2.00 MiB.", "CUDA error: an illegal memory access"]
)
def test_a_card_that_fails_does_not_change_the_attention_in_silence(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Another start on the same card would have another fingerprint."""

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError(text)

    monkeypatch.setattr(varlen_attention, "attend_packed", fail)
    with pytest.raises(RuntimeError, match=text[:10]):
        varlen_attention.is_right(make_model())


def test_the_kernel_is_checked_with_the_models_own_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def note(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        shapes.append((query.shape[1:], key.shape[1:]))
        return run_plainly(query, key, *rest, **options)

    monkeypatch.setattr(varlen_attention, "attend_packed", note)
    assert varlen_attention.is_right(
        make_model(hidden_size=768, num_attention_heads=12, num_key_value_heads=4, head_dim=128)
    )
    assert varlen_attention.is_right(
        make_model(num_attention_heads=6, num_key_value_heads=6, hidden_size=192, head_dim=None)
    )
    assert shapes == [((12, 128), (4, 128)), ((6, 32), (6, 32))]


def test_a_kernel_that_sees_too_much_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def see_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        tokens = [0, query.shape[0]], [0, key.shape[0]]
        return varlen_attention.attend_plainly(query, key, value, tokens)

    monkeypatch.setattr(varlen_attention, "attend_packed", see_all)
    assert not varlen_attention.is_right(make_model())


def test_a_model_on_a_cpu_has_another_attention() -> None:
    assert not varlen_attention.supports(SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16))
