"""Calibration multiplies 16-bit numbers in float32 where the CPU has no instructions for them, and only there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.products.text.model_loading import load_model, load_tokenizer
from pipeline.products.text.optimize import llm_compressor
from pipeline.products.text.optimize.float32_products import Float32Products, list_slow_dtypes
from tests.fakes.tiny_llama import write_tiny_llama

HALF = [torch.bfloat16, torch.float16]


class SeenProducts(TorchDispatchMode):
    """Notes the number format of each matrix product that the CPU does; the library traces on none."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        if func.overloadpacket in products and args[-1].device.type == "cpu":
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "multiply",
    [
        lambda a, b: torch.nn.functional.linear(a, weight=b, bias=a[0, 0]),
        lambda a, b: a @ b.transpose(-1, -2),
        lambda a, b: torch.bmm(a, b.expand(2, 8, 8)),
        lambda a, b: a[0].mm(b),
        lambda a, b: torch.nn.functional.scaled_dot_product_attention(a, a, a, attn_mask=torch.ones(8, 8).bool()),
        lambda a, b: torch.nn.functional.scaled_dot_product_attention(a, a, a, attn_mask=b),
    ],
    ids=["linear", "operator", "bmm", "mm", "attention", "attention with a bias"],
)
def test_a_product_is_the_float32_one_rounded_once(dtype: torch.dtype, multiply: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 8, 8).to(dtype), torch.randn(8, 8).to(dtype)
    with Float32Products(HALF), SeenProducts() as seen:
        product = multiply(a, b)
    assert product.dtype == dtype
    assert product.equal(multiply(a.float(), b.float()).to(dtype))
    assert not seen.dtypes & set(HALF)


def test_a_result_that_goes_into_a_given_tensor_is_there() -> None:
    """The product came back, and the tensor stayed as it was."""
    a, given = torch.randn(4, 4).bfloat16(), torch.zeros(4, 4).bfloat16()
    with Float32Products(HALF):
        assert torch.mm(a, a, out=given) is given
    assert given.equal(torch.mm(a, a))


def test_other_formats_and_functions_stay() -> None:
    a = torch.randn(4, 4)
    with Float32Products([torch.bfloat16]), SeenProducts() as seen:
        assert (a.double() @ a.double()).dtype == torch.float64
        assert (a.half() @ a.half()).dtype == torch.float16
        assert (a.bfloat16() + a.bfloat16()).dtype == torch.bfloat16
    assert seen.dtypes == {torch.float64, torch.float16}


@pytest.mark.parametrize(
    ("bfloat16", "float16", "slow"), [(True, True, []), (True, False, [torch.float16]), (False, False, HALF)]
)
def test_formats_are_slow_where_torch_has_no_kernel_of_onednn(
    monkeypatch: pytest.MonkeyPatch, bfloat16: bool, float16: bool, slow: list[torch.dtype]
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: float16)
    assert list_slow_dtypes() == slow
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert list_slow_dtypes() == HALF


@pytest.mark.parametrize("slow", [[torch.bfloat16], []])
def test_a_recipe_is_run_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: list[torch.dtype]) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    model, tokenizer = load_model(folder, dtype="bfloat16"), load_tokenizer(folder)
    recipe = [llm_compressor.GPTQModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])]
    monkeypatch.setattr(llm_compressor, "list_slow_dtypes", lambda: slow)
    with SeenProducts() as seen:
        llm_compressor.run_recipe(model, tokenizer, recipe, samples=[[1, 2, 3, 4], [5, 6, 7]])
    assert (torch.bfloat16 in seen.dtypes) == (not slow)
    assert {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point} == {
        torch.bfloat16
    }
