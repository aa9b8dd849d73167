"""The sections `detector` and `upscaler`: what contradicts itself is refused with the path of its key."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.environment import GpuProof
from pipeline.errors import SettingsError
from pipeline.gate.verdicts import describe_policy
from pipeline.network_preflight import describe_slow_formats
from pipeline.params import parse_params
from tests.paths import ROOT
from tests.tiny_networks import describe_detector, describe_upscaler, make_detector
from tests.unit.test_environment import machine

WHOLE = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
RULE = {"layers": ["blur"], "algorithm": "direct", "dtype": "float32"}
POLICY = {"kind": "conv_policy", "algorithm": "winograd_f43", "dtype": "float16"}
HALF = {"kind": "precision", "dtype": "float16"}
TILING = {"kind": "tiling", "tile": 32, "overlap": 0.125, "window": "hann"}
GATE = describe_detector()["gate"]
EVAL = describe_detector()["evals"]["squares"]


def refusal(section: str, changes: dict[str, Any]) -> str:
    describe = {"detector": describe_detector, "upscaler": describe_upscaler}[section]
    with pytest.raises(SettingsError) as caught:
        parse_params(WHOLE | {section: describe(**changes)})
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("params.yaml: ")


def steps(*given: dict[str, Any], name: str = "mine") -> dict[str, Any]:
    return {"steps": {name: list(given)}}


def tolerances(**changed: Any) -> dict[str, Any]:
    kept = {name.replace("__", "/"): value for name, value in changed.items() if value is not None}
    return {"gate": GATE | {"tolerances": kept}}


def areas(**given: list[float]) -> dict[str, Any]:
    return {"evals": {"squares": EVAL | {"areas": given}}}


AT = "detector.candidates.mine.steps"


@pytest.mark.parametrize(("changes", "said"), [
    pytest.param({"gate": describe_detector()["gate"] | {"max_slowdown": 25.0}},
                 "detector.gate.max_slowdown: expected 10 or less, got 25", id="slowdown-in-percent"),
    pytest.param(steps(POLICY, HALF), f"{AT}.1: expected no precision beside conv_policy, which is emulated",
                 id="policy-and-precision"),
    pytest.param(steps({"kind": "channels_last"}, POLICY), f"{AT}.0: expected no channels_last beside conv_policy",
                 id="policy-and-memory-format"),
    pytest.param(steps(POLICY, {"kind": "compile", "mode": "default"}), f"{AT}.1: expected no compile beside",
                 id="policy-and-compilation"),
    pytest.param(steps(TILING), f"{AT}.0: expected a step that a detector knows, got tiling: a box may lie in two "
                 "tiles", id="tiling-of-a-detector"),
    pytest.param(steps(HALF | {"dtype": "float32", "autocast": True}), f"{AT}.0.autocast: expected bfloat16 or float16 "
                 "with it, got float32", id="autocast-float32"),
    pytest.param(steps(HALF, HALF), f"{AT}.1: precision is there twice; remove one", id="twice"),
    pytest.param(steps({"kind": "gptq"}), f"{AT}.0: expected one of the kinds 'precision', 'conv_policy', "
                 "'channels_last', 'compile', 'tiling', got 'gptq'", id="unknown-step"),
    pytest.param(steps({"dtype": "float16"}), f"{AT}.0: expected a key `kind`", id="no-kind"),
    pytest.param(steps(POLICY | {"rules": [RULE | {"dtpye": "x"}]}), f"{AT}.0.rules.0.dtpye: unknown key",
                 id="unknown-key-of-a-rule"),
    pytest.param(steps(POLICY | {"rules": [RULE | {"layers": []}]}), f"{AT}.0.rules.0.layers: expected 1 or more",
                 id="rule-without-layers"),
    pytest.param(steps(POLICY | {"rules": [RULE | {"layers": [""]}]}), f"{AT}.0.rules.0.layers.0: expected 1 or more",
                 id="empty-pattern"),
    pytest.param(steps(POLICY | {"algorithm": "winograd_f63"}), f"{AT}.0.algorithm: expected 'direct', 'winograd_f23' "
                 "or 'winograd_f43', got 'winograd_f63'", id="unknown-algorithm"),
    pytest.param(steps(HALF | {"dtype": "int8"}), f"{AT}.0.dtype: expected 'float32', 'bfloat16' or 'float16'",
                 id="unknown-dtype"),
    pytest.param(areas(small=[0.0, 9.0]), "detector.evals.squares.areas.small: expected another name than COCO's own",
                 id="area-named-as-cocos"),
    pytest.param(areas(tiny=[9.0, 4.0]), "detector.evals.squares.areas.tiny: expected the smaller area first, got "
                 "[9.0, 4.0]; swap them", id="area-swapped"),
    pytest.param(areas(tiny=[9.0]), "detector.evals.squares.areas.tiny: expected 2 or more", id="area-of-one-bound"),
    pytest.param(tolerances(squares__ap={"overall": 0.1}), "detector.gate.tolerances: expected "
                 "squares/finite_output_rate with an overall tolerance that can stop a release, found none; NaN",
                 id="finite-not-gated"),
    pytest.param(tolerances(squares__finite_output_rate={"buckets": {"dim": 0.1}}), "expected squares/"
                 "finite_output_rate with an overall tolerance", id="finite-gated-in-a-bucket-only"),
    pytest.param(tolerances(**{"squares/psnr_db": {"overall": 0.1}}), "detector.gate.tolerances.squares/psnr_db: no "
                 "such metric", id="metric-of-another-kind"),
    pytest.param({"evals": {"squares": EVAL | {"kind": "upscaling"}}}, "detector.evals.squares.kind: expected "
                 "'detection', got 'upscaling'", id="eval-of-another-kind"),
    pytest.param({"reference": "none"}, "detector.reference: expected one of the candidates", id="no-reference"),
    pytest.param({"reference": "half", "release": ["squares"]}, "detector.candidates.half.steps: expected none, as it "
                 "is the reference", id="reference-with-steps"),
    pytest.param({"release": ["squares"]}, "detector.release.0: 'squares' is the reference", id="release-reference"),
    pytest.param({"adapter": 3}, "detector.adapter: expected text, got 3", id="adapter-no-text"),
    pytest.param({"running": {"batch_size": 0, "num_workers": 1, "num_threads": 1}}, "detector.running.batch_size: "
                 "expected 1 or more, got 0", id="no-batch"),
    pytest.param({"adaptor": "x.py"}, "detector.adaptor: unknown key", id="unknown-key"),
])  # fmt: skip
def test_a_detector_that_contradicts_itself_is_told_by_its_key(changes: dict[str, Any], said: str) -> None:
    found = refusal("detector", changes)
    assert found.startswith(said) or said in found.partition(": ")[2] or said in found


@pytest.mark.parametrize(("changes", "said"), [
    pytest.param(steps(TILING | {"overlap": 0.6}), "upscaler.candidates.mine.steps.0.overlap: expected 0.5 or less",
                 id="overlap"),
    pytest.param(steps(TILING | {"tile": 4}), "upscaler.candidates.mine.steps.0.tile: expected 8 or more", id="tile"),
    pytest.param(steps(TILING | {"tile": 32.0}), "upscaler.candidates.mine.steps.0.tile: expected a whole number",
                 id="tile-no-integer"),
    pytest.param(steps(TILING | {"window": "cosine"}), "upscaler.candidates.mine.steps.0.window: expected 'none', ",
                 id="window"),
    pytest.param(steps(TILING | {"overlap": 0.0}), "upscaler.candidates.mine.steps.0.overlap: expected a pixel or "
                 "more for window hann to blend, got 0 of a tile of 32; raise it, or set window: none", id="gap"),
    pytest.param(steps(TILING | {"overlap": 0.01, "window": "linear"}), "upscaler.candidates.mine.steps.0.overlap: "
                 "expected a pixel or more for window linear to blend, got 0.01 of a tile of 32", id="half-a-pixel"),
    pytest.param({"evals": {"views": {"kind": "upscaling", "evalset": "e", "areas": {}}}},
                 "upscaler.evals.views.areas: unknown key", id="areas"),
])  # fmt: skip
def test_an_upscaler_that_contradicts_itself_is_told_by_its_key(changes: dict[str, Any], said: str) -> None:
    assert refusal("upscaler", changes).startswith(said)


@pytest.mark.parametrize(("section", "given"), [
    ("detector", steps(HALF, {"kind": "channels_last"}, {"kind": "compile", "mode": "default", "dynamic": True})),
    ("detector", steps(HALF | {"autocast": True})),
    ("detector", steps(POLICY | {"rules": [RULE, RULE | {"reason": "small"}]})),
    ("upscaler", steps(TILING, POLICY)),
    ("upscaler", steps(TILING, HALF, {"kind": "channels_last"})),
    ("upscaler", steps(TILING | {"overlap": 0.0, "window": "none"})),
])  # fmt: skip
def test_steps_that_go_together_are_let_through(section: str, given: dict[str, Any]) -> None:
    """Without it a check that refuses every second step would pass all above."""
    describe = {"detector": describe_detector, "upscaler": describe_upscaler}[section]
    assert getattr(parse_params(WHOLE | {section: describe(**given)}), section).candidates["mine"].steps


@pytest.mark.parametrize(("metric", "limit", "is_fine"), [
    ("psnr_db", 1.5, True), ("seam_step_levels", 4.0, True), ("finite_output_rate", 1.0, False), ("ssim", 3.0, False),
])  # fmt: skip
def test_what_may_be_lost_is_told_in_the_unit_of_the_metric(metric: str, limit: float, is_fine: bool) -> None:
    """Below 1 a seam of a grey level and a half could not be allowed; 3 of a share would allow everything."""
    changed = describe_upscaler()
    changed["gate"]["tolerances"][f"views/{metric}"] = {"overall": limit}
    if is_fine:
        assert parse_params(WHOLE | {"upscaler": changed}).upscaler
        return
    with pytest.raises(SettingsError, match=rf"upscaler.gate.tolerances.views/{metric}.overall: expected less than 1 "):
        parse_params(WHOLE | {"upscaler": changed})


def test_the_policy_names_what_is_there_for_speed_alone() -> None:
    """From it the gate knows that a verdict must hold a gain, whatever the verdict says."""
    track = make_detector({"half": [HALF], "last": [{"kind": "channels_last"}],
                           "both": [HALF, {"kind": "compile", "mode": "default"}]})  # fmt: skip
    assert describe_policy(track).for_speed == ("last", "both")
    assert describe_policy(parse_params(WHOLE)).for_speed == ()


@pytest.mark.parametrize(("facts", "is_slow"), [
    ({"instruction_sets": ("avx2", "fma")}, True), ({"instruction_sets": ("avx2", "avx512f")}, False),
    ({"instruction_sets": ("asimd",)}, False),
    ({"instruction_sets": ("avx2",), "gpu_proof": GpuProof(architectures=(), devices=())}, False),
])  # fmt: skip
def test_sixteen_bits_without_avx512_are_warned_of(facts: dict[str, Any], is_slow: bool) -> None:
    """Eight minutes went by on 300 pictures that take 14 seconds in float32, without a word."""
    track = make_detector({"half": [HALF], "last": [{"kind": "channels_last"}], "policy": [POLICY]})
    found = describe_slow_formats(track, machine(**facts))
    assert [line.partition(": this CPU")[0] for line in found] == (["detector.candidates: half"] if is_slow else [])
