"""What a candidate is timed against, when two outputs are one, and how much work tiles are."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file, save_file

from pipeline.errors import EngineError
from pipeline.products.vision import costs, rounding
from pipeline.products.vision.adapters import load_adapter
from pipeline.products.vision.costs import Load, choose_baseline, count_work, measure_costs, measure_speed
from pipeline.products.vision.loading import load_network
from pipeline.records.serving import ConvArithmetic, NetworkServing, Tiling
from pipeline.running import timing
from pipeline.running.timing import TOLERANCES, find_tolerance
from tests.fakes.tiny_networks import DETECTOR, write_detector

TILED: dict[str, Any] = {"tiling": Tiling(tile=64, overlap=0.125, window="hann")}
POLICY: dict[str, Any] = {"conv_policy": {"blur": ConvArithmetic(algorithm="direct", dtype="float16")}}
CPU = torch.device("cpu")
FORWARD = "return self.pool(self.scale(self.blur(x)))"
PIXELS = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def measure_all(load: Load, serving: NetworkServing, *given: Any) -> dict[str, Any]:
    return measure_costs(load, load(serving), *given)


@pytest.mark.parametrize(
    ("changes", "baseline"),
    [
        pytest.param({}, None, id="the-reference-itself"),
        pytest.param({"dtype": "bfloat16"}, {}, id="a-number-format"),
        pytest.param({"channels_last": True}, {}, id="a-memory-format"),
        pytest.param(
            {"channels_last": True, "dtype": "bfloat16"}, {"dtype": "bfloat16"}, id="within-its-number-format"
        ),
        pytest.param({"compile_mode": "default", "compile_dynamic": True, "channels_last": True}, {}, id="both"),
        pytest.param(POLICY, None, id="an-emulation"),
        pytest.param(TILED, None, id="more-work"),
        pytest.param(TILED | {"channels_last": True}, TILED, id="within-tiles"),
        pytest.param(TILED | {"dtype": "bfloat16"}, TILED, id="a-number-format-within-tiles"),
    ],
)
def test_a_candidate_is_timed_against_the_choice_at_hand(changes: dict[str, Any], baseline: Any) -> None:
    """A memory format in bfloat16 beside float32 would take the number format's gain for its own."""
    shared: dict[str, Any] = {"batch_size": 8, "num_threads": 2}
    expected = None if baseline is None else NetworkServing(**shared, **baseline)
    assert choose_baseline(NetworkServing(**shared, **changes)) == expected


def test_what_runs_in_tiles_is_timed_beside_float32_in_the_same_tiles() -> None:
    """Beside nothing, channels-last in tiles was judged by slow bfloat16 in tiles alone."""
    serving = NetworkServing(batch_size=8, dtype="bfloat16", channels_last=True, **TILED)
    assert serving.plain_tiled == NetworkServing(batch_size=8, **TILED)
    assert choose_baseline(serving) == NetworkServing(batch_size=8, dtype="bfloat16", **TILED)


@pytest.mark.parametrize(
    ("changes", "same", "other"),
    [
        pytest.param(POLICY, None, None, id="an-emulation-has-no-time"),
        pytest.param({}, None, {}, id="weights-alone"),
        pytest.param(TILED, {}, {}, id="tiles-beside-whole-pictures"),
        pytest.param(TILED | {"channels_last": True}, TILED, TILED, id="a-step-within-its-tiles"),
        pytest.param({"dtype": "bfloat16"}, {}, {}, id="a-number-format"),
    ],
)
def test_the_time_in_total_is_told_beside_the_reference(changes: dict[str, Any], same: Any, other: Any) -> None:
    """Another checkpoint without a step had none, and an overlap of a half cost nothing."""
    serving = NetworkServing(batch_size=8, **changes)
    for expected, is_other in ((same, False), (other, True)):
        found = serving.choose_total(is_other=is_other)
        assert found == (None if expected is None else NetworkServing(batch_size=8, **expected))


def test_other_weights_are_timed_beside_the_reference_whatever_they_give(tmp_path: Path) -> None:
    """Their outputs differ by nature: demanding equal ones would leave every INT8 artefact untimed."""
    write_detector(tmp_path / "louder", gain=3.0)
    tensors = load_file(tmp_path / "louder/model.safetensors")
    save_file(tensors | {"scale.bias": torch.ones(1)}, tmp_path / "louder/model.safetensors")
    load = make_load(tmp_path)
    other = partial(load_network, tmp_path / "louder", load_adapter(tmp_path / "adapter.py"))
    cases: list[tuple[dict[str, Any], str | None]] = [({}, None), ({"channels_last": True}, "torch float32")]
    for changes, speed in cases:
        network = other(NetworkServing(**changes))
        found = measure_costs(other, network, PIXELS, PIXELS[:1], [PIXELS], load_reference=load)
        assert found["total"]["baseline"] == "the reference, torch float32" and found["total"]["timed"]
        assert found["speed"] is None or found["speed"]["baseline"] == speed


def test_a_candidate_is_timed_in_total_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster than its own number format without the step, it may be slower than what runs without any."""
    monkeypatch.setattr(costs, "is_surely_slower", lambda found: False)
    load, one = make_load(tmp_path), PIXELS[:1]
    both = measure_all(load, NetworkServing(channels_last=True, dtype="bfloat16"), PIXELS, one, [PIXELS])
    assert (both["speed"]["baseline"], both["total"]["baseline"]) == ("torch bfloat16", "torch float32")
    single = measure_all(load, NetworkServing(channels_last=True), PIXELS, one, [PIXELS])
    assert single["total"] is single["speed"], "timed once"
    monkeypatch.setattr(costs, "is_surely_slower", lambda found: found is not None)
    slow = measure_all(load, NetworkServing(channels_last=True, dtype="bfloat16"), PIXELS, one, [PIXELS])
    assert slow["speed"] is None and slow["total"]["timed"], "what is slower in total has no gain within it"


@pytest.mark.parametrize(("cpu", "wall", "expected"), [(1.01, 0.9, True), (1.0, 1.0, False), (0.9, 2.0, True)])
def test_surely_slower_is_an_interval_above_one_by_any_clock(cpu: float, wall: float, expected: bool) -> None:
    found = {"clock": "cpu", "timed": {"cpu": {"ratio": {"low": cpu}}, "wall": {"ratio": {"low": wall}}}}
    assert costs.is_surely_slower(found) is expected
    assert not costs.is_surely_slower(None) and not costs.is_surely_slower({"timed": None})


@pytest.mark.parametrize(
    ("size", "tile", "overlap", "expected"),
    [
        ((512, 768), 64, 0.125, 1.3125),  # 9 tiles by 14
        ((512, 768), 64, 0.0, 1.0),
        ((512, 768), 1024, 0.5, 1.0),  # one tile, cut to the picture
        ((64, 128), 64, 0.5, 1.5),
        ((32, 96), 64, 0.125, 4 / 3),  # cut along one side
    ],
)
def test_work_is_counted_in_pixels(size: tuple[int, int], tile: int, overlap: float, expected: float) -> None:
    serving = NetworkServing(tiling=Tiling(tile=tile, overlap=overlap, window="linear"))
    assert count_work(size, serving) == pytest.approx(expected)
    assert count_work(size, NetworkServing()) == 1.0


def measure(load: Any, serving: NetworkServing) -> dict[str, Any]:
    base = choose_baseline(serving)
    assert base is not None
    return measure_speed(load, serving, base, PIXELS)


def make_load(root: Path, text: str = DETECTOR) -> Any:
    write_detector(root / "squares")
    (root / "adapter.py").write_text(text)
    return partial(load_network, root / "squares", load_adapter(root / "adapter.py"))


def test_equal_outputs_are_timed_and_others_are_not(tmp_path: Path) -> None:
    found = measure(make_load(tmp_path), NetworkServing(channels_last=True))
    assert found["difference"] < 1e-4 and found["timed"].keys() == {"cpu", "wall"}
    assert found["clock"] == "cpu" and found["batch"] == 2
    (tmp_path / "other").mkdir()
    depends = (
        FORWARD + " + (1.0 if x.is_contiguous(memory_format=torch.channels_last) and x.shape[1] == 1 and \\\n"
        "            self.blur.weight.dtype == torch.bfloat16 else 0.0)"
    )
    found = measure(make_load(tmp_path / "other", DETECTOR.replace(FORWARD, depends)), NetworkServing(dtype="bfloat16"))
    assert found["timed"] is None and found["difference"] > 0.4


SHIFT = "class Shift(nn.Module):\n    def forward(self, x):\n        return x + 30000\n\n\nclass Squares"


@pytest.mark.parametrize(("wrong", "is_timed"), [("", True), (" + 2000 * (x.dtype == torch.bfloat16)", False)])
def test_what_rounding_alone_does_to_a_network_is_no_other_output(tmp_path: Path, wrong: str, is_timed: bool) -> None:
    """Values far from zero round by more than they vary: a fixed limit called that another computation."""
    text = DETECTOR.replace("class Squares", SHIFT).replace("self.pool =", "self.shift = Shift()\n        self.pool =")
    load = make_load(tmp_path, text.replace(FORWARD, f"return self.shift(self.blur(x){wrong})"))
    found = measure(load, NetworkServing(dtype="bfloat16"))
    assert found["difference"] > 0.4, "of a standard deviation"
    assert (found["timed"] is not None) == is_timed == (found["difference"] <= found["tolerance"])
    assert 2 < found["tolerance"] < 10, "twice half of bfloat16's step of 128 at 30,000"


@pytest.mark.parametrize(
    ("forward", "difference"),
    [
        pytest.param("return torch.zeros(len(x), 3)", 0.0, id="constant"),
        pytest.param("return [self.blur(x), torch.tensor(3.0)]", None, id="one-number"),
        pytest.param("return {'boxes': self.blur(x)[..., :0], 'labels': torch.ones(2)}", 0.0, id="no-boxes"),
    ],
)
def test_outputs_without_a_deviation_are_compared_too(tmp_path: Path, forward: str, difference: float | None) -> None:
    """Zero over zero was no number, an empty tensor has no largest element: nothing of it was ever timed."""
    load = make_load(tmp_path, DETECTOR.replace(FORWARD, forward))
    found = measure(load, NetworkServing(channels_last=True))
    assert found["timed"] is not None
    assert difference is None or found["difference"] == difference


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(
            "heat = self.blur(x)\n        return heat[heat > heat.float().mean() * (1.2 if heat.dtype == "
            "torch.bfloat16 else 1)]",
            id="another-shape",
        ),
        pytest.param("return [self.blur(x)] * (2 if x.dtype == torch.bfloat16 else 1)", id="another-number"),
    ],
)
def test_boxes_that_a_number_format_selects_otherwise_end_no_evaluation(tmp_path: Path, forward: str) -> None:
    """Two shapes can't be subtracted: the evaluation of a network with its own NMS ended after its last picture."""
    load = make_load(tmp_path, DETECTOR.replace(FORWARD, forward))
    found = measure(load, NetworkServing(dtype="bfloat16"))
    assert found["timed"] is None and found["difference"] is None


def test_memory_is_counted_without_computing_and_is_none_where_that_is_not_possible(tmp_path: Path) -> None:
    plain = NetworkServing(batch_size=2)
    large = torch.zeros(1, 512, 512, 3, dtype=torch.uint8)
    found = measure_all(make_load(tmp_path), plain, PIXELS, large, [PIXELS])
    assert found["peak_mib"] == pytest.approx(2 * 512 * 512 * 4 / 2**20, rel=0.01), "what goes in and comes out"
    assert found["peak_pixels"] == [512, 512] and found["speed"] is None and found["compile"] is None
    (tmp_path / "other").mkdir()
    load = make_load(tmp_path / "other", DETECTOR.replace(FORWARD, "return self.blur(x)[x > 3]"))
    assert measure_all(load, plain, PIXELS, large, [PIXELS])["peak_mib"] is None


def test_memory_of_a_picture_in_tiles_is_that_of_all_its_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first tile alone, the picture that it is put in was not there yet."""
    wide = "return torch.cat([self.blur(x)] * 9, 1).mean(1, keepdim=True)"
    load = make_load(tmp_path, DETECTOR.replace(FORWARD, wide))
    large, serving = torch.zeros(1, 256, 192, 3, dtype=torch.uint8), NetworkServing(**TILED)
    found = measure_all(load, serving, PIXELS, large, [PIXELS])["peak_mib"]
    monkeypatch.setattr(costs, "_run_twice", lambda call: call)
    assert found == measure_all(load, serving, PIXELS, large, [PIXELS])["peak_mib"] > 256 * 192 * 4 / 2**20


def test_a_network_with_batch_norm_has_a_memory_number(tmp_path: Path) -> None:
    """Its buffers are no parameters: left as they are beside tensors without content, nothing could be counted."""
    load = make_load(
        tmp_path,
        DETECTOR.replace("self.scale =", "self.norm = nn.BatchNorm2d(1)\n        self.scale =").replace(
            FORWARD, "return self.scale(self.norm(self.blur(x)))"
        ),
    )
    weights = tmp_path / "squares/model.safetensors"
    own = {f"norm.{name}": tensor for name, tensor in torch.nn.BatchNorm2d(1).state_dict().items()}
    save_file(load_file(weights) | own, weights)
    large = torch.zeros(1, 256, 256, 3, dtype=torch.uint8)
    for dtype in ("float32", "bfloat16"):
        found = measure_all(load, NetworkServing(dtype=dtype), PIXELS, large, [PIXELS])
        size = 4 if dtype == "float32" else 2
        assert found["peak_mib"] == pytest.approx(3 * 256 * 256 * size / 2**20, rel=0.35), dtype


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param("return self.blur(x) + torch.rand_like(x)", id="noise"),
        pytest.param("return nn.functional.dropout(self.blur(x))", id="dropout-that-knows-no-eval"),
        pytest.param(
            "heat = self.blur(x)\n        return heat[torch.rand_like(heat) > 0.5]", id="another-number-of-boxes"
        ),
    ],
)
def test_a_network_that_draws_at_random_is_refused(tmp_path: Path, forward: str) -> None:
    """One draw would be judged as if it were all."""
    load = make_load(tmp_path, DETECTOR.replace(FORWARD, forward))
    with pytest.raises(
        EngineError,
        match=r"adapter.py: two runs of the same pictures differ by .* of the outputs' "
        "standard deviation, expected at most 0.0001; take what is random out of the module",
    ):
        measure_all(load, NetworkServing(), PIXELS, PIXELS[:1], [PIXELS])


def test_what_a_verdict_on_speed_rests_on_has_the_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict would rest on what a neighbour did."""
    alone, read = [False], []

    @contextlib.contextmanager
    def be_alone() -> Iterator[None]:
        alone.append(True)
        yield
        alone.pop()

    def read_clock() -> float:
        read.append(alone[-1])
        return time.perf_counter()

    monkeypatch.setattr(timing, "have_machine_alone", be_alone)
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=read_clock))
    serving = NetworkServing(batch_size=2, channels_last=True)
    measure_all(make_load(tmp_path), serving, PIXELS, PIXELS[:1], [PIXELS])
    assert len(read) >= 4 * costs.MIN_ROUNDS and all(read)


def test_shapes_are_read_only_where_something_is_compiled(tmp_path: Path) -> None:
    """An evalset of photographs has thousands of shapes: one batch of each was held in memory for nothing."""

    def read(number: int) -> torch.Tensor:
        raise AssertionError("nobody asked")

    shapes = (read(number) for number in range(1))
    assert math.isfinite(measure_all(make_load(tmp_path), NetworkServing(), PIXELS, PIXELS[:1], shapes)["work"])


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2)
def test_a_shape_beyond_the_recompile_limit_is_counted(tmp_path: Path) -> None:
    """torch then runs the network uncompiled and only logs it; the first shape's speed stood for all."""
    serving = NetworkServing(batch_size=2, compile_mode="default", compile_dynamic=False)
    shapes = [PIXELS[:, :, :width] for width in (32, 24, 16, 8)]
    met = measure_all(make_load(tmp_path), serving, PIXELS, PIXELS[:1], shapes)["compile"]
    assert (met["num_graphs"], met["num_recompilations"], met["num_shapes"], met["limit"]) == (1, 1, 4, 2)
    assert met["num_over_limit"] == 1 and met["shape_over_limit"] == 3


@pytest.mark.slow
def test_others_go_on_while_something_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 16 cores all waited for two minutes, as somebody beside it had something to time."""
    entered: list[str] = []

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    def read_shape() -> torch.Tensor:
        assert entered == ["in"]
        return PIXELS

    monkeypatch.setattr(costs, "keep_nobody_waiting", enter)
    serving = NetworkServing(batch_size=2, compile_mode="default", channels_last=True)
    measure_all(make_load(tmp_path), serving, PIXELS, PIXELS[:1], (read_shape() for _ in range(1)))
    assert entered == ["in", "out"] * 2  # it is compiled anew to follow its memory format


def test_what_is_not_compiled_keeps_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs for a moment, and would wait for all timings before it comes in again."""
    monkeypatch.setattr(costs, "keep_nobody_waiting", lambda: pytest.fail("gave its turn back"))
    found = measure_all(make_load(tmp_path), NetworkServing(channels_last=True), PIXELS, PIXELS[:1], [PIXELS])
    assert found["layout"]["num_reorders"].keys() == {"last", "first"}


@pytest.mark.slow
def test_what_is_timed_is_what_ran_all_shapes(tmp_path: Path) -> None:
    """A network that is compiled anew for its own shape alone is faster than the one that serves."""
    loaded, load = [], make_load(tmp_path)

    def count(serving: NetworkServing) -> Any:
        loaded.append(serving.compile_mode)
        return load(serving)

    serving = NetworkServing(batch_size=2, compile_mode="default")
    found = measure_all(count, serving, PIXELS, PIXELS[:1], [PIXELS])
    assert found["speed"]["timed"] and loaded.count("default") == 1
    assert found["compile"]["num_over_limit"] == 0 and found["compile"]["shape_over_limit"] is None


def test_float32_convolutions_of_a_gpu_are_judged_as_what_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    """In TF32 a memory format moves outputs by a hundredth of their deviation; by float32's limit none ever gained."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert find_tolerance(torch.float32, gpu) == TOLERANCES[torch.float16] > find_tolerance(torch.float32, CPU)
    assert find_tolerance(torch.bfloat16, gpu) == TOLERANCES[torch.bfloat16]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert find_tolerance(torch.float32, gpu) == TOLERANCES[torch.float32]


def test_the_limit_of_tf32_is_that_of_its_mantissa(tmp_path: Path, monkeypatch: Any) -> None:
    load, limits = make_load(tmp_path), {}
    monkeypatch.setattr(rounding, "is_tensor_float", lambda dtype, device: dtype == torch.float32)
    monkeypatch.setattr(rounding, "find_tolerance", lambda dtype, device: 0.0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        network = load(NetworkServing(batch_size=2, num_threads=1))
        limits[dtype] = rounding.limit_rounding(network, PIXELS, dtype, 1).max()
    assert limits[torch.float32] == pytest.approx(limits[torch.float16], rel=1) and limits[torch.float32] > 0
    assert limits[torch.bfloat16] > 3 * limits[torch.float32]


@pytest.mark.parametrize(
    ("number", "cut"),
    [
        (1.0, 1.0),
        (1 + 2**-10, 1 + 2**-10),
        (1 + 2**-11, 1 + 2**-10),
        (1 + 2**-12, 1.0),
        (-1 - 2**-11, -1 - 2**-10),
        (92265.0, 92288.0),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (math.nan, math.nan),
    ],
)
def test_tf32_keeps_ten_bits_and_float32s_range(number: float, cut: float) -> None:
    got = rounding._cut_mantissa(torch.tensor([number], dtype=torch.float32)).item()
    assert got == cut or (math.isnan(got) and math.isnan(cut))
