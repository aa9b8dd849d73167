"""INT8 convolutions: what is written, what is refused, and which kernels run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from pipeline.errors import CheckpointError, NumericsError, QuantgateError, SettingsError
from pipeline.products.vision import int8_conv
from pipeline.products.vision.adapters import Adapter
from pipeline.products.vision.candidate import build_network_candidate
from pipeline.products.vision.conv_policy import list_convolutions
from pipeline.products.vision.int8_conv import Int8Conv2d, read_kernels
from pipeline.products.vision.loading import Network, load_network
from pipeline.products.vision.preflight import _INT8_SETS, check_network, describe_slow_int8
from pipeline.products.vision.quantize import InputRange, observe, plan_layers, quantize_weight, write_quantized
from pipeline.products.vision.quantize_proof import check_quantized, read_coverage
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.serving import NetworkServing
from pipeline.running.environment import read_machine
from tests.fakes.tiny_networks import NUM_PICTURES, make_detector, write_evalset, write_project, write_squares
from tests.running.test_environment import H100, machine

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
adds_exactly = pytest.mark.skipif(
    not {*_INT8_SETS} & {*read_machine().instruction_sets}, reason="sums saturate on x86 without instructions for INT8"
)
STEP = {"kind": "quantize", "dtype": "int8", "num_pictures": 4}


class Net(nn.Module):
    """Strides, groups, dilation, padding of all kinds, and what stays float."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.ReLU(), nn.Conv2d(8, 8, 3, padding="same")
        )
        self.wide = nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False)
        self.mirrored = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Conv2d(8, 4, 1, padding="valid")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.up(self.mirrored(self.wide(self.body(self.stem(x))))))
        return output


QUANTIZED = ["stem", "body.0", "body.2", "wide", "head"]


def adapt(build: Callable[[], nn.Module] = Net) -> Adapter:
    return Adapter(
        Path("net.py"),
        "0",
        build=lambda config: build(),
        preprocess=lambda pixels: pixels.permute(0, 3, 1, 2).float() / 64 - 2,
        postprocess=lambda outputs, config: outputs,
    )


def draw(num: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (num, 18, 22, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "float"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(Net().state_dict(), folder / "model.safetensors")
    return folder


def load(folder: Path, **serving: Any) -> Network:
    return load_network(folder, adapt(), NetworkServing(**serving))


def calibrate(source: Path, observer: Any = "minmax", exclude: tuple[str, ...] = ()) -> dict[str, InputRange]:
    network = load(source)
    plan = plan_layers(network.module, exclude)
    inputs = [(f"picture-{i}", network.prepare(pixels[None])) for i, pixels in enumerate(draw(4))]
    return observe(network, plan.layers, inputs, observer=observer)


@pytest.fixture
def ranges(source: Path) -> dict[str, InputRange]:
    return calibrate(source)


@pytest.fixture
def folder(source: Path, ranges: dict[str, InputRange]) -> Path:
    written = source.with_name("int8")
    write_quantized(written, source, ranges)
    return written


def list_all(source: Path) -> list[str]:
    return list(list_convolutions(load(source).module))


def check(folder: Path, source: Path, ranges: dict[str, InputRange]) -> None:
    check_quantized(folder, source, ranges, list_all(source))


def damage(folder: Path, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, change in changes.items():
        key = name.replace("__", ".")
        tensors[key] = change(tensors.get(key, torch.empty(0)).clone())
    save_file(tensors, path)


def test_what_was_written_is_read_back(source: Path, folder: Path, ranges: dict[str, InputRange]) -> None:
    check(folder, source, ranges)
    coverage = {c.layer: (c.format, c.asked) for c in read_coverage(folder, ranges, list_all(source))}
    assert coverage == {name: ("int8", True) for name in QUANTIZED} | {"mirrored": ("float32", False)}
    plan = plan_layers(load(source).module, [])
    assert dict(plan.fallbacks) == {
        "mirrored": "padding mode reflect: it stays float",
        "up": "ConvTranspose2d is not covered: it stays float",
    }


@adds_exactly
def test_the_kernel_computes_what_the_stored_numbers_say(source: Path, folder: Path) -> None:
    """Catches a wrong padding, group, stride, zero point or scale: float64 by the definition, layer by layer."""
    network = load(folder)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in QUANTIZED:
        layer = network.module.get_submodule(name)
        layer.register_forward_hook(lambda _m, given, out, name=name: seen.update({name: (given[0], out.clone())}))
    network.run(network.prepare(draw(2)))
    stored = load_file(folder / "model.safetensors")
    for name in QUANTIZED:
        conv = network.module.get_submodule(name)
        assert isinstance(conv, Int8Conv2d)
        scale, zero = stored[f"{name}.input_scale"].double(), stored[f"{name}.input_zero_point"].double()
        x = (((seen[name][0] * (1 / scale.item())).round().double() + zero).clamp(0, 255) - zero) * scale
        weight = stored[f"{name}.weight"].double() * stored[f"{name}.weight_scale"].double()[:, None, None, None]
        bias = stored[f"{name}.bias"].double() if f"{name}.bias" in stored else None
        expected = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        assert torch.allclose(seen[name][1].double(), expected, rtol=1e-4, atol=1e-4), name


@adds_exactly
def test_int8_is_near_float32(source: Path, folder: Path) -> None:
    exact, rounded = load(source), load(folder)
    x = exact.prepare(draw(4))
    expected, came = exact.run(x), rounded.run(x)
    error = ((came - expected).square().mean() / expected.square().mean()).sqrt()
    assert 0 < error < 0.05


def test_it_loads_again_bit_equal(source: Path, folder: Path, ranges: dict[str, InputRange]) -> None:
    """No pickle; the same calibration writes the same bytes, in one picture or eight the outputs are the same."""
    again = source.with_name("again")
    write_quantized(again, source, calibrate(source))
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    one, other, last = load(folder), load(again), load(folder, channels_last=True)
    x = one.prepare(draw(3))
    assert torch.equal(one.run(x), other.run(x))
    assert torch.equal(one.run(x), last.run(last.prepare(draw(3))))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@adds_exactly
def test_the_profiler_says_which_kernels_ran(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is reflected and one transposed: both stay float. Emulated, all of them are."""
    network = load(folder)
    x = network.prepare(draw())
    kernels = read_kernels(network.module, lambda: network.run(x))
    assert kernels is not None
    assert (kernels["num_layers"], kernels["num_kernel_calls"], kernels["num_float_calls"]) == (5, 5, 2)
    assert kernels["implementations"], "oneDNN names its kernels"
    assert read_kernels(load(source).module, lambda: None) is None
    monkeypatch.setattr(int8_conv, "has_kernel", lambda: False)
    emulated = load(folder)
    found = read_kernels(emulated.module, lambda: emulated.run(x))
    assert found is not None and (found["num_kernel_calls"], found["num_float_calls"]) == (0, 7)
    assert torch.allclose(emulated.run(x), network.run(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"body__2__weight_scale": lambda t: 2 * t}, r"body\.2: expected each weight within half a step"),
        ({"wide__weight_scale": lambda t: t.index_fill(0, torch.tensor([3]), 2 * t[3].item())}, "wide: .* channel 3 "),
        ({"stem__weight_scale": lambda t: t * float("nan")}, "stem: weight_scale: expected finite positive scales"),
        ({"stem__weight_scale": lambda t: -t}, "stem: weight_scale: expected finite positive scales"),
        ({"stem__weight_scale": lambda t: t[:1]}, "stem: expected weights of shape"),
        ({"head__input_scale": lambda t: 2 * t}, "head: input_scale: expected .* which calibration found"),
        ({"head__input_scale": lambda t: t / 2}, "head: input_scale: expected .* which calibration found"),
        ({"head__input_scale": lambda t: t.repeat(2)}, "head: expected one input_scale and one input_zero_point"),
        ({"head__input_zero_point": lambda t: t + 1}, "head: input_zero_point: expected .* which calibration found"),
        ({"head__bias": lambda t: t + 0.1}, r"head\.bias: expected the tensor of .*, found another"),
        ({"mirrored__weight": lambda t: t.half()}, r"mirrored\.weight: expected the tensor of .*, found another"),
        ({"spare": lambda t: torch.zeros(1)}, "'spare' is one too many"),
        ({"wide__weight": lambda t: (t.float() * 0.9).to(torch.int8)}, "wide: expected each weight within half a step"),
        ({"wide__weight": lambda t: t.float()}, "wide: expected INT8 weights, as was asked, found float ones"),
    ],
)
def test_planted_defects_are_refused(
    source: Path, folder: Path, ranges: dict[str, InputRange], changes: dict[str, Any], said: str
) -> None:
    damage(folder, **changes)
    with pytest.raises(CheckpointError, match=said) as caught:
        check(folder, source, ranges)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: replace(given, scale=2 * given.scale), "head: input_scale: expected a step up to"),
        (lambda given: replace(given, scale=float("nan")), "head: input_scale: expected "),
        (lambda given: replace(given, zero_point=given.zero_point + 10), "head: input_zero_point: expected steps "),
        (lambda given: replace(given, zero_point=300), "head: input_zero_point: expected steps within"),
    ],
)
def test_ranges_that_were_not_seen_are_refused(
    source: Path, ranges: dict[str, InputRange], change: Callable[[InputRange], InputRange], said: str
) -> None:
    """Catches an observer that is asked wrongly: what is written is what it said, and that is not what was seen."""
    wrong = ranges | {"head": change(ranges["head"])}
    write_quantized(source.with_name("wrong"), source, wrong)
    with pytest.raises(CheckpointError, match=said):
        check(source.with_name("wrong"), source, wrong)


def test_a_missing_tensor_and_a_short_file_are_one_line(
    source: Path, folder: Path, ranges: dict[str, InputRange]
) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["head.bias"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"'head\.bias' is missing"):
        check(folder, source, ranges)
    path.write_bytes(path.read_bytes()[:-7])
    for read in (lambda: check(folder, source, ranges), lambda: load(folder)):
        with pytest.raises(CheckpointError, match="its header promises .* bytes, the file has") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_layer_whose_input_is_all_zeros_is_no_defect(source: Path) -> None:
    network = load(source)
    black = [("black", torch.zeros_like(network.prepare(draw())))]
    ranges = observe(network, ["stem"], black, observer="histogram")
    written = source.with_name("black")
    write_quantized(written, source, ranges)
    check_quantized(written, source, ranges, list_all(source))


def test_a_layer_that_should_have_stayed_float_is_refused(source: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="head: expected float weights, as was asked, found INT8 ones"):
        check(folder, source, calibrate(source, exclude=("head",)))


def test_channels_of_small_weights_keep_their_steps() -> None:
    """Fails with the smallest scale of torchao's x86 settings, 2^-12: such a channel would be all zeros."""
    weight = torch.randn(2, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    weight[1] *= 1e-4
    stored, scale = quantize_weight(weight)
    assert stored[1].abs().max() >= 127 and scale[1] < 1e-5


def test_scales_are_those_of_the_library(tmp_path: Path) -> None:
    """Torchao's own flow for x86 finds the same scales where its floor is not met."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    network = Network(module, {}, adapt(), NetworkServing())
    inputs = [network.prepare(pixels[None]) for pixels in draw(4)]
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        prepared = prepare_pt2e(torch.export.export(module, (inputs[0],)).module(), quantizer)
        for x in inputs:
            prepared(x)
        nodes = convert_pt2e(prepared).graph.nodes
    scales = [node.args[1] for node in nodes if "quantized_decomposed.quantize_per_tensor" in str(node.target)]
    given = observe(network, ["0", "2"], [("", x) for x in inputs], observer="histogram")
    for name, found in given.items():
        assert min(abs(found.scale / scale - 1) for scale in scales) < 1e-5, name


def test_patterns_and_networks_that_leave_nothing(source: Path) -> None:
    module = load(source).module
    with pytest.raises(SettingsError, match=r"exclude\.1: 'hed' matches no convolution; the nearest are head"):
        plan_layers(module, ["stem", "hed"])
    with pytest.raises(SettingsError, match="expected convolutions to quantise, found none: exclude names all 6"):
        plan_layers(module, ["*"])
    with pytest.raises(SettingsError, match="this network has no Conv2d"):
        plan_layers(nn.Linear(2, 2), [])
    with pytest.raises(SettingsError, match="0: padding mode reflect"):
        plan_layers(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")), [])
    shared = nn.Conv2d(1, 1, 1)
    both = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Conv2d(1, 1, 1)})
    plan = plan_layers(both, [])
    assert plan.layers == ("c",) and dict(plan.fallbacks) == {"a": "it has two names: it stays float"}


def test_what_is_in_int8_is_not_quantised_again(folder: Path) -> None:
    with pytest.raises(SettingsError, match="expected float weights to quantise, found 'stem' in INT8"):
        plan_layers(load(folder).module, [])


def test_inputs_that_can_not_be_calibrated_on(source: Path) -> None:
    network = load(source)
    x = network.prepare(draw())
    with pytest.raises(NumericsError, match="stem: expected finite inputs .* picture 'p'"):
        observe(network, ["stem"], [("p", x * float("inf"))], observer="minmax")
    with pytest.raises(NumericsError, match="spare: expected a layer that calibration pictures reach"):
        network.module.spare = nn.Conv2d(1, 1, 1)
        observe(network, ["stem", "spare"], [("p", x)], observer="minmax")


def test_weights_of_another_architecture_are_one_line(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["wide.input_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"wide\.input_scale: expected a tensor beside the INT8 weights"):
        load(folder)
    with pytest.raises(CheckpointError, match="expected a Conv2d that can run in INT8"):
        load_network(folder, adapt(lambda: nn.Linear(2, 2)), NetworkServing())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = write_project(tmp_path / "project")
    write_squares(root / "evalsets/both", NUM_PICTURES + 6)  # the last are on no eval
    cases = (root / "evalsets/both/cases.jsonl").read_text().splitlines()[NUM_PICTURES:]
    write_evalset(root / "evalsets/both", "detection", [json.loads(case) for case in cases])
    (root / "evalsets/both").rename(root / "evalsets/calibration")
    return root


def make(*steps: dict[str, Any], calibration: str | None = "evalsets/calibration") -> VisionProduct:
    return make_detector({"int8": list(steps)}, calibration_images=calibration)


def test_a_candidate_is_built_recorded_and_checked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product = make(STEP | {"exclude": ["scale"]})
    build = project / "build/detector"
    candidate = build_network_candidate("int8", product, root=project, build=build)
    assert candidate.checkpoint.path == "build/detector/candidates/int8/checkpoint"
    assert candidate.checkpoint.format == "int8" and candidate.checkpoint.parent_digest
    assert [(c.layer, c.format) for c in candidate.coverage] == [("blur", "int8"), ("scale", "float32")]
    assert "torchao" in candidate.libraries
    record = json.loads((build / "candidates/int8/candidate.json").read_text())
    assert record["steps"][0]["exclude"] == ["scale"]

    def double(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stored, scale = quantize_weight(weight)
        return stored, 2 * scale

    monkeypatch.setattr("pipeline.products.vision.quantize.quantize_weight", double)
    with pytest.raises(CheckpointError, match="blur: expected each weight within half a step"):
        build_network_candidate("int8", product, root=project, build=build)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"exclude": ["blurr"]}, r"candidates\.int8\.steps\.0\.exclude\.0: 'blurr' matches no convolution"),
        ({"exclude": ["*"]}, r"candidates\.int8\.steps\.0: expected convolutions to quantise, found none"),
        ({"num_pictures": 7}, r"candidates\.int8\.steps\.0: num_pictures: expected at most the 6 of"),
    ],
)
def test_a_step_that_can_not_be_done_is_one_line(project: Path, step: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        build_network_candidate("int8", make(STEP | step), root=project, build=project / "build/detector")
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_computed_from_others_stays_float(project: Path) -> None:
    """It has no tensor of its own to quantise: what was written was said to be wrong."""
    adapter, weights = project / "detector/adapter.py", project / "detector/squares/model.safetensors"
    plain = "nn.Conv2d(1, 1, 3, padding=1)"
    adapter.write_text(adapter.read_text().replace(plain, f"torch.nn.utils.weight_norm({plain})"))
    tensors = load_file(weights)
    weight = tensors.pop("blur.weight")
    save_file(tensors | {"blur.weight_v": weight, "blur.weight_g": weight.norm().reshape(1, 1, 1, 1)}, weights)
    built = build_network_candidate("int8", make(STEP), root=project, build=project / "build/detector")
    assert [(f.layer, f.reason) for f in built.fallbacks] == [
        ("blur", "a weight that is computed from others, as by weight_norm: it stays float")
    ]
    assert [(c.layer, c.format) for c in built.coverage] == [("scale", "int8")]


@pytest.mark.parametrize("autocast", [False, True])
def test_another_number_format_of_weights_in_int8_is_one_line(project: Path, autocast: bool) -> None:
    """Scales were cast to bfloat16: torch refused them in the evaluation, and the adapter was named for it."""
    build = project / "build/detector"
    build_network_candidate("int8", make(STEP), root=project, build=build)
    shutil.copytree(build / "candidates/int8/checkpoint", project / "detector/int8")
    half = {"kind": "precision", "dtype": "bfloat16", "autocast": autocast}
    product = make(half)
    settings = product.candidates["int8"].model_copy(update={"checkpoint": "detector/int8"})
    product = product.model_copy(update={"candidates": product.candidates | {"int8": settings}})
    with pytest.raises(
        SettingsError, match=r"int8\.steps\.0: expected no precision beside weights in INT8, as of 'blur'"
    ):
        build_network_candidate("int8", product, root=project, build=build)


def test_too_few_pictures_are_told_before_any_work(project: Path) -> None:
    with pytest.raises(SettingsError, match=r"candidates\.int8\.steps\.0\.num_pictures: expected at most the 6"):
        check_network(make(STEP | {"num_pictures": 7}), project)
    with pytest.raises(SettingsError, match="calibration_images: .*elsewhere"):
        check_network(make(STEP, calibration="evalsets/elsewhere"), project)
    with pytest.raises(SettingsError, match="calibration_images: expected pictures that no eval shows"):
        check_network(make(STEP, calibration="evalsets/squares"), project)
    (project / "evalsets/calibration/cases.jsonl").write_text("")
    with pytest.raises(QuantgateError, match="calibration/cases.jsonl: ") as caught:
        check_network(make(STEP), project)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"instruction_sets": ("avx2", "avx512f", "avx512_vnni")}, None),
        ({"instruction_sets": ("asimd", "i8mm")}, None),
        ({"instruction_sets": ("avx2", "avx512f")}, "this CPU has no instructions for INT8"),
        ({"instruction_sets": ("avx512_vnni",), "gpus": (H100,), "torch_build": "cuda 13.0"}, "emulated on a GPU"),
    ],
)
def test_a_machine_without_int8_is_warned_of(facts: dict[str, Any], said: str | None) -> None:
    lines = describe_slow_int8(make(STEP), machine(**facts))
    assert len(lines) == (said is not None) and all(said in line for line in lines if said)
    assert not describe_slow_int8(make_detector(), machine(**facts))
