"""The detector that ncnn runs is the shipped one, and a policy's time is that of the layers as it runs them."""

from __future__ import annotations

import functools
import importlib.util
import json
import re

import numpy as np
import pytest
import torch

from benchmarks import winograd_speed
from benchmarks.ncnn_nets import (
    ALGORITHMS,
    Layer,
    describe_convolution,
    describe_detector,
    list_layers,
    pack_weights,
    write_network,
)
from benchmarks.winograd_speed import POLICIES, ROOT, add_up, bind_layers, bind_policies
from models.people.detector import Detector
from pipeline.products.params import get_product, load_params
from pipeline.products.vision.settings import ConvPolicyStep, VisionProduct

DIRECT, F23, F43, CALIBRATED, MIXED = POLICIES


@functools.cache
def make_detector() -> Detector:
    torch.manual_seed(0)
    return Detector(json.loads((ROOT / "models/people/config.json").read_text())).eval()


@functools.cache
def make_layers() -> tuple[Layer, ...]:
    return tuple(list_layers(make_detector(), torch.randn(1, 3, 64, 64)))


def parse(text: str) -> list[tuple[str, list[str], list[str]]]:
    """Return kind, inputs and outputs of each line."""
    parsed = []
    for kind, _, num_inputs, num_outputs, *rest in (line.split() for line in text.splitlines()[2:]):
        blobs = rest[: int(num_inputs) + int(num_outputs)]
        parsed.append((kind, blobs[: int(num_inputs)], blobs[int(num_inputs) :]))
    return parsed


def test_a_convolution_is_written_as_ncnn_reads_it() -> None:
    """A wrong number here is another convolution, or weights that are read from the wrong place."""
    layer = next(layer for layer in make_layers() if layer.name == "stages.1.0.0")
    line = str(describe_convolution(layer, "a", "b"))
    assert line == "Convolution stages.1.0.0 1 1 a b 0=80 1=3 3=2 4=1 5=1 6=34560 9=1"
    assert str(describe_convolution(layer, "a", "b", is_direct=True, relu=False)).endswith("6=34560 31=64")


def test_the_detector_is_written_with_every_blob_read_once() -> None:
    """ncnn gives a blob to one reader: without a Split the second one gets nothing."""
    text = write_network(describe_detector(make_layers()))
    lines, header = parse(text), text.splitlines()[1].split()
    made = [blob for _, _, outputs in lines for blob in outputs]
    read = [blob for _, inputs, _ in lines for blob in inputs]
    assert header == [str(len(lines)), str(len(made))]
    assert len(set(made)) == len(made) and len(set(read)) == len(read)
    assert set(made) - set(read) == {"small", "medium", "large"} and set(read) < set(made)
    for i, (_, inputs, _) in enumerate(lines):
        assert set(inputs) <= {blob for _, _, outputs in lines[:i] for blob in outputs}
    assert sum(kind == "Convolution" for kind, _, _ in lines) == 26


def test_all_weights_are_packed_in_the_order_of_the_text() -> None:
    operations = describe_detector(make_layers())
    num_weights = sum(parameter.numel() for parameter in make_detector().parameters())
    packed = pack_weights(operations, make_layers())
    assert len(packed) == 4 * (num_weights + 26)
    assert np.frombuffer(packed[4:112], np.float32) == pytest.approx(
        make_detector().stem[0][0].weight.detach().flatten()[:27].numpy()
    )


def test_only_named_layers_are_kept_from_winograd() -> None:
    text = write_network(describe_detector(make_layers(), direct=["branches.small.0.0", "stem.1.0"]))
    assert re.findall(r"Convolution (\S+) .* 31=64", text) == ["stem.1.0", "branches.small.0.0"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(DIRECT, 0), (F23, 16), (F43, 16), (CALIBRATED, 16), (MIXED, 13)],
    ids=lambda p: getattr(p, "name", None),
)
def test_a_policy_leaves_other_kernels_and_strides_direct(policy: winograd_speed.Policy, expected: int) -> None:
    chosen = {layer.name: policy.choose(layer) for layer in make_layers()}
    assert sum(algorithm != "direct" for algorithm in chosen.values()) == expected
    assert {chosen[name] for name in ("stem.0.0", "laterals.1", "branches.small.3")} == {"direct"}


def test_a_policy_adds_up_each_layer_by_its_own_algorithm() -> None:
    """Of equal layers each counts, and a layer that a rule names costs what direct costs."""
    layers = make_layers()
    times = {
        (layer.shape, name): [cost, 10 * cost]
        for layer in layers
        for name, cost in (("direct", 1.0), ("winograd_f23", 0.5), ("winograd_f43", 0.25))
    }
    assert add_up(DIRECT, layers, times) == [26, 260]
    assert add_up(F43, layers, times) == [10 + 16 / 4, 100 + 160 / 4]
    assert add_up(CALIBRATED, layers, times) == [10 + 14 / 4 + 2 / 2, 100 + 140 / 4 + 20 / 2]
    assert add_up(MIXED, layers, times) == [13 + 13 / 4, 130 + 130 / 4]


def test_the_calibrated_policy_is_the_one_that_is_released() -> None:
    """Its speed is read beside its verdict: another policy's would be believed."""
    product = get_product(load_params(ROOT / "params.yaml"), "people", kind=VisionProduct)
    (step,) = product.candidates["winograd-calibrated"].steps
    assert isinstance(step, ConvPolicyStep)
    rules = tuple((pattern, rule.algorithm) for rule in step.rules for pattern in rule.layers)
    assert (CALIBRATED.algorithm, CALIBRATED.rules) == (step.algorithm, rules)


def test_wrong_outputs_and_ignored_algorithms_are_not_timed() -> None:
    output = torch.randn(5, 8, 8)
    with pytest.raises(ValueError, match="nothing is timed"):
        winograd_speed.check_output(output + 0.01, output, "layer")
    with pytest.raises(ValueError, match="nothing is timed"):
        winograd_speed.check_output(output / 0, output, "layer")
    with pytest.raises(ValueError, match="ignored"):
        winograd_speed.check_algorithms({"direct": output, "winograd_f23": output.clone()}, "layer")


def test_without_ncnn_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert winograd_speed.main([]) == 1
    assert "pip install 'ncnn" in capsys.readouterr().err


def test_ncnn_gives_torch_s_outputs_by_every_algorithm() -> None:
    pytest.importorskip("ncnn", reason="ncnn is an extra: pip install 'ncnn>=1.0.20261020,<2'")
    x = torch.randn(1, 3, 64, 64)
    layers = list_layers(make_detector(), x)
    with torch.no_grad():
        runs, _ = bind_layers(layers)
        policy_runs, _ = bind_policies(layers, x, [level[0] for level in make_detector()(x)])
    assert {algorithm for _, algorithm in runs} == set(ALGORITHMS)
    assert list(policy_runs) == [policy.name for policy in POLICIES if policy is not CALIBRATED]
