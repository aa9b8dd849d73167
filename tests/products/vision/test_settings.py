"""Products of kind vision, a detector and an upscaler: what contradicts itself is refused with the path of its key."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.errors import SettingsError
from pipeline.gate.verdicts import build_policy
from pipeline.products.params import Params, get_product, parse_params
from pipeline.products.vision.preflight import describe_slow_formats
from pipeline.products.vision.settings import VisionProduct
from pipeline.settings.base import Product
from tests.fakes.tiny_networks import describe_detector, describe_upscaler, make_detector
from tests.paths import ROOT
from tests.running.test_environment import H100, machine

WHOLE = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
RULE = {"layers": ["blur"], "algorithm": "direct", "dtype": "float32"}
POLICY = {"kind": "conv_policy", "algorithm": "winograd_f43", "dtype": "float16"}
HALF = {"kind": "precision", "dtype": "float16"}
TILING = {"kind": "tiling", "tile": 32, "overlap": 0.125, "window": "hann"}
GATE = describe_detector()["gate"]
EVAL = describe_detector()["evals"]["squares"]
VIEWS = describe_upscaler()["evals"]["views"]


DESCRIBE = {"detector": describe_detector, "upscaler": describe_upscaler}


def parse(described: dict[str, Any]) -> Params:
    """Parse the shipped project with this product added, or put in place of the one of its name."""
    product = dict(described)
    name, own = product.pop("name"), product.pop("candidates")
    others = {key: candidate for key, candidate in WHOLE["candidates"].items() if candidate["product"] != name}
    assert not own.keys() & others.keys()
    return parse_params(
        {
            "products": WHOLE["products"] | {name: product},
            "candidates": others | {key: {"product": name} | candidate for key, candidate in own.items()},
        }
    )


def refusal(name: str, changes: dict[str, Any]) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(DESCRIBE[name](**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("params.yaml: ")


def locate(name: str, said: str) -> str:
    """Put the product in front of a message about one of its settings; candidates stand beside products."""
    return said if said.startswith("candidates") else f"products.{name}.{said}"


def steps(*given: dict[str, Any], name: str = "mine") -> dict[str, Any]:
    return {"steps": {name: list(given)}}


def tolerances(**changed: Any) -> dict[str, Any]:
    kept = {name.replace("__", "/"): value for name, value in changed.items() if value is not None}
    return {"gate": GATE | {"tolerances": kept}}


def areas(**given: list[float]) -> dict[str, Any]:
    return {"evals": {"squares": EVAL | {"areas": given}}}


AT = "candidates.mine.steps"
INT8 = {"kind": "quantize", "dtype": "int8", "num_pictures": 4}
CALIBRATION = {"calibration_images": "evalsets/calibration"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(
            {"gate": describe_detector()["gate"] | {"max_slowdown": 25.0}},
            "gate.max_slowdown: expected 10 or less, got 25",
            id="slowdown-in-percent",
        ),
        pytest.param(
            steps(POLICY, HALF),
            f"{AT}.1: expected no precision beside conv_policy, which is emulated",
            id="policy-and-precision",
        ),
        pytest.param(
            steps({"kind": "channels_last"}, POLICY),
            f"{AT}.0: expected no channels_last beside conv_policy",
            id="policy-and-memory-format",
        ),
        pytest.param(
            steps(POLICY, {"kind": "compile", "mode": "default"}),
            f"{AT}.1: expected no compile beside",
            id="policy-and-compilation",
        ),
        pytest.param(
            steps(TILING),
            f"{AT}.0: expected a step that a detector knows, got tiling: a box may lie in two tiles",
            id="tiling-of-a-detector",
        ),
        pytest.param(
            steps(HALF | {"dtype": "float32", "autocast": True}),
            f"{AT}.0.autocast: expected bfloat16 or float16 with it, got float32",
            id="autocast-float32",
        ),
        pytest.param(steps(HALF, HALF), f"{AT}.1: precision is there twice; remove one", id="twice"),
        pytest.param(
            steps(INT8),
            f"{AT}.0: expected calibration pictures, found no products.detector.calibration_images",
            id="int8-without-pictures",
        ),
        pytest.param(
            CALIBRATION | steps(HALF, INT8), f"{AT}.0: expected no precision beside quantize", id="int8-and-precision"
        ),
        pytest.param(
            CALIBRATION | steps(INT8, POLICY), f"{AT}.0: expected no quantize beside conv_policy", id="int8-and-policy"
        ),
        pytest.param(
            CALIBRATION | steps(INT8 | {"dtype": "float16"}), f"{AT}.0.dtype: expected 'int8'", id="int8-in-float16"
        ),
        pytest.param(
            CALIBRATION | steps(INT8 | {"num_pictures": 0}), f"{AT}.0.num_pictures: expected", id="int8-by-no-picture"
        ),
        pytest.param(
            steps({"kind": "gptq"}),
            f"{AT}.0: expected one of the kinds 'precision', 'quantize', 'conv_policy', "
            "'channels_last', 'compile', 'tiling', got 'gptq'",
            id="unknown-step",
        ),
        pytest.param(steps({"dtype": "float16"}), f"{AT}.0: expected a key `kind`", id="no-kind"),
        pytest.param(
            steps(POLICY | {"rules": [RULE | {"dtpye": "x"}]}),
            f"{AT}.0.rules.0.dtpye: unknown key; remove it or correct its spelling: is `dtype` meant",
            id="unknown-key-of-a-rule",
        ),
        pytest.param(
            steps(POLICY | {"rules": [RULE | {"layers": []}]}),
            f"{AT}.0.rules.0.layers: expected 1 or more",
            id="rule-without-layers",
        ),
        pytest.param(
            steps(POLICY | {"rules": [RULE | {"layers": [""]}]}),
            f"{AT}.0.rules.0.layers.0: expected 1 or more",
            id="empty-pattern",
        ),
        pytest.param(
            steps(POLICY | {"algorithm": "winograd_f63"}),
            f"{AT}.0.algorithm: expected 'direct', 'winograd_f23' or 'winograd_f43', got 'winograd_f63'",
            id="unknown-algorithm",
        ),
        pytest.param(
            steps(HALF | {"dtype": "int8"}),
            f"{AT}.0.dtype: expected 'float32', 'bfloat16' or 'float16'",
            id="unknown-dtype",
        ),
        pytest.param(
            areas(small=[0.0, 9.0]),
            "evals.squares.areas.small: expected another name than COCO's own",
            id="area-named-as-cocos",
        ),
        pytest.param(
            areas(tiny=[9.0, 4.0]),
            "evals.squares.areas.tiny: expected the smaller area first, got [9.0, 4.0]; swap them",
            id="area-swapped",
        ),
        pytest.param(areas(tiny=[9.0]), "evals.squares.areas.tiny: expected 2 or more", id="area-of-one-bound"),
        pytest.param(
            tolerances(squares__ap={"overall": 0.1}),
            "gate.tolerances: expected "
            "squares/finite_output_rate with an overall tolerance that can stop a release, found none; NaN",
            id="finite-not-gated",
        ),
        pytest.param(
            tolerances(squares__finite_output_rate={"buckets": {"dim": 0.1}}),
            "gate.tolerances: expected squares/finite_output_rate with an overall tolerance",
            id="finite-gated-in-a-bucket-only",
        ),
        pytest.param(
            tolerances(**{"squares/psnr_db": {"overall": 0.1}}),
            "gate.tolerances.squares/psnr_db: no such metric",
            id="metric-of-another-kind",
        ),
        pytest.param(
            {
                "evals": {"squares": EVAL, "views": VIEWS},
                **tolerances(squares__finite_output_rate={"overall": 0.1}, views__finite_output_rate={"overall": 0.1}),
            },
            "evals.views.kind: expected detection, as the first eval has, got upscaling: an "
            "adapter gives boxes or pictures; make it a product of its own",
            id="eval-of-another-task",
        ),
        pytest.param(
            {"evals": {"squares": VIEWS}},
            "gate.tolerances.squares/ap: no such metric",
            id="detector-evaluated-as-an-upscaler",
        ),
        pytest.param(
            {"evals": {"squares": EVAL | {"kind": "images"}}},
            "evals.squares: expected one of the kinds 'detection', 'upscaling', got 'images'",
            id="eval-of-another-kind",
        ),
        pytest.param({"running": {"batch_size": 4}}, "running: unknown key", id="old-name-of-serving"),
        pytest.param(
            {"serving": {"batch_size": 4, "num_threads": 1, "num_workers": 1}},
            "serving.num_workers: unknown key",
            id="workers-change-no-output",
        ),
        pytest.param(
            {"resources": {"num_workers": 0}}, "resources.num_workers: expected 1 or more, got 0", id="no-worker"
        ),
        pytest.param({"reference": "none"}, "reference: expected one of the candidates", id="no-reference"),
        pytest.param(
            {"reference": "half", "release": ["squares"]},
            "candidates.half.steps: expected none, as it is the reference",
            id="reference-with-steps",
        ),
        pytest.param({"release": ["squares"]}, "release.0: 'squares' is the reference", id="release-reference"),
        pytest.param({"adapter": 3}, "adapter: expected text, got 3", id="adapter-no-text"),
        pytest.param(
            {"serving": {"batch_size": 0, "num_threads": 1}},
            "serving.batch_size: expected 1 or more, got 0",
            id="no-batch",
        ),
        pytest.param({"adaptor": "x.py"}, "adaptor: unknown key", id="unknown-key"),
    ],
)
def test_a_detector_that_contradicts_itself_is_told_by_its_key(changes: dict[str, Any], said: str) -> None:
    assert refusal("detector", changes).startswith(locate("detector", said))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(
            steps(TILING | {"overlap": 0.6}), "candidates.mine.steps.0.overlap: expected 0.5 or less", id="overlap"
        ),
        pytest.param(steps(TILING | {"tile": 4}), "candidates.mine.steps.0.tile: expected 8 or more", id="tile"),
        pytest.param(
            steps(TILING | {"tile": 32.0}),
            "candidates.mine.steps.0.tile: expected a whole number",
            id="tile-no-integer",
        ),
        pytest.param(
            steps(TILING | {"window": "cosine"}), "candidates.mine.steps.0.window: expected 'none', ", id="window"
        ),
        pytest.param(
            steps(TILING | {"overlap": 0.0}),
            "candidates.mine.steps.0.overlap: expected a pixel or "
            "more for window hann to blend, got 0 of a tile of 32; raise it, or set window: none",
            id="gap",
        ),
        pytest.param(
            steps(TILING | {"overlap": 0.01, "window": "linear"}),
            "candidates.mine.steps.0.overlap: "
            "expected a pixel or more for window linear to blend, got 0.01 of a tile of 32",
            id="half-a-pixel",
        ),
        pytest.param(
            {"evals": {"views": {"kind": "upscaling", "evalset": "e", "areas": {}}}},
            "evals.views.areas: unknown key",
            id="areas",
        ),
    ],
)
def test_an_upscaler_that_contradicts_itself_is_told_by_its_key(changes: dict[str, Any], said: str) -> None:
    assert refusal("upscaler", changes).startswith(locate("upscaler", said))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("detector", steps(HALF, {"kind": "channels_last"}, {"kind": "compile", "mode": "default", "dynamic": True})),
        ("detector", steps(HALF | {"autocast": True})),
        ("detector", steps(POLICY | {"rules": [RULE, RULE | {"reason": "small"}]})),
        ("upscaler", steps(TILING, POLICY)),
        ("upscaler", steps(TILING, HALF, {"kind": "channels_last"})),
        ("upscaler", steps(TILING | {"overlap": 0.0, "window": "none"})),
    ],
)
def test_steps_that_go_together_are_let_through(name: str, given: dict[str, Any]) -> None:
    """Without it a check that refuses every second step would pass all above."""
    product = get_product(parse(DESCRIBE[name](**given)), name, kind=VisionProduct)
    assert len(product.candidates["mine"].steps) == len(given["steps"]["mine"])


@pytest.mark.parametrize(
    ("metric", "limit", "is_fine"),
    [
        ("psnr_db", 1.5, True),
        ("seam_step_levels", 4.0, True),
        ("finite_output_rate", 1.0, False),
        ("ssim", 3.0, False),
    ],
)
def test_what_may_be_lost_is_told_in_the_unit_of_the_metric(metric: str, limit: float, is_fine: bool) -> None:
    """Below 1 a seam of a grey level and a half could not be allowed; 3 of a share would allow everything."""
    changed = describe_upscaler()
    changed["gate"]["tolerances"][f"views/{metric}"] = {"overall": limit}
    if is_fine:
        product = get_product(parse(changed), "upscaler", kind=VisionProduct)
        assert product.gate.tolerances[f"views/{metric}"].overall == limit
        return
    where = f"products.upscaler.gate.tolerances.views/{metric}.overall"
    with pytest.raises(SettingsError, match=rf"{where}: expected less than 1 "):
        parse(changed)


def test_the_policy_names_what_is_there_for_speed_alone() -> None:
    """From it the gate knows that a verdict must hold a gain, whatever the verdict says."""
    product = make_detector(
        {"half": [HALF], "last": [{"kind": "channels_last"}], "both": [HALF, {"kind": "compile", "mode": "default"}]}
    )
    assert build_policy(product).for_speed == ("last", "both")
    assert build_policy(get_product(parse_params(WHOLE), "agent", kind=Product)).for_speed == ()


@pytest.mark.parametrize(
    ("facts", "is_slow"),
    [
        ({"instruction_sets": ("avx2", "fma")}, True),
        ({"instruction_sets": ("avx2", "avx512f")}, False),
        ({"instruction_sets": ("asimd",)}, False),
        ({"instruction_sets": ("avx2",), "gpus": (H100,), "torch_build": "cuda 13.0"}, False),
    ],
)
def test_sixteen_bits_without_avx512_are_warned_of(facts: dict[str, Any], is_slow: bool) -> None:
    """Eight minutes went by on 300 pictures that take 14 seconds in float32, without a word."""
    product = make_detector({"half": [HALF], "last": [{"kind": "channels_last"}], "policy": [POLICY]})
    found = describe_slow_formats(product, machine(**facts))
    assert [line.partition(": this CPU")[0] for line in found] == (["candidates: half"] if is_slow else [])
