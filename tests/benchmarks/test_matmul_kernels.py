"""The benchmark of matrix products: operands stand for the weight, and a decoder layer is the sum of its products."""

from __future__ import annotations

import pytest
import torch

from benchmarks import matmul_kernels
from benchmarks.matmul_kernels import FORMATS, SHAPES, add_up, format_layers, pack_nibbles, restore_int4, shorten


def make_operands() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(16, 512, dtype=torch.bfloat16), 0.02 * torch.randn(256, 512, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", [name for name in FORMATS if "INT4" not in name])
def test_the_product_is_that_of_the_rounded_operands(name: str) -> None:
    inputs, weight = make_operands()
    operands, multiply, reference = FORMATS[name](inputs, weight)
    assert torch.allclose(multiply(*operands).float(), reference, atol=0.005 * float(reference.abs().max()), rtol=0)
    exact = inputs.float() @ weight.float().t()
    assert float((reference - exact).norm() / exact.norm()) < 0.05


def test_int4_levels_and_scales_are_what_torch_reads() -> None:
    inputs, weight = make_operands()
    levels, scales = matmul_kernels.round_int4(weight)
    restored = restore_int4(levels, scales)
    assert float((restored - weight.float()).norm() / weight.float().norm()) < 0.12
    assert torch.equal(pack_nibbles(levels) >> 4, levels[:, ::2])
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 8)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(inputs, packed, matmul_kernels.GROUP_SIZE, scales)
    reference = inputs.float() @ restored.t()
    assert torch.allclose(product.float(), reference, atol=0.005 * float(reference.abs().max()), rtol=0)


def test_a_decoder_layer_is_the_sum_of_its_products() -> None:
    times = {(shape.name, 1): {"bfloat16": [2.0, 4.0], "FP8, one scale": [1.0, 2.0]} for shape in SHAPES}
    assert add_up("bfloat16", times, 1) == [10.0, 20.0]
    assert add_up("INT4, groups of 128", times, 1) == []
    rows = list(format_layers(times, [1]))
    assert rows[2:] == [
        "| bfloat16 | 15,000,000 µs, 1.00 times |",
        "| FP8, scales by row | – |",
        "| FP8, one scale | 7,500,000 µs, 2.00 times |",
        "| INT4, groups of 128 | – |",
    ]


def test_a_kernel_is_named_without_what_its_template_says() -> None:
    name = "void at::native::(anonymous namespace)::tinygemm_kernel<at::native::ALayout_RM<(KReductionType)0>, 4>(int)"
    assert shorten(name) == "at::native::tinygemm_kernel"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert matmul_kernels.main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1
