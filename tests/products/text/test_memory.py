"""The memory estimate: right order of magnitude for host and GPU, an error only when no retry can help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CheckpointError, SizeError
from pipeline.products.params import get_product, load_params
from pipeline.products.text.memory import (
    MemoryNeed,
    Room,
    check_needs,
    estimate_needs,
    read_card_room,
)
from pipeline.products.text.settings import CandidateSettings, TextProduct
from pipeline.products.text.step_settings import Calibration
from pipeline.running.environment import Gpu, Machine
from tests.fakes.hollow_llama import write_hollow_llama
from tests.paths import ROOT

GIB = 1024  # MiB
CALIBRATION = Calibration(sources=["prose"], num_samples=256, max_tokens=512, length_exponent=0.0)
STEPS = {kind: {"kind": kind, "calibration": CALIBRATION} for kind in ("gptq", "awq")}


def make_machine(*cards_gib: int, memory_gib: int = 64, build: str = "cuda 13.0") -> Machine:
    return Machine(
        os="Linux",
        cpu="",
        instruction_sets=(),
        num_cores=8,
        memory_mib=memory_gib * GIB,
        num_torch_threads=8,
        torch_build=build if cards_gib else "cpu",
        gpus=tuple(Gpu(name="card", driver="1", memory_mib=size * GIB) for size in cards_gib),
    )


def make_product(checkpoint: Path, steps: list[dict[str, Any]], engine: dict[str, Any] | None = None) -> TextProduct:
    product = get_product(load_params(ROOT / "params.yaml"), "agent", kind=TextProduct)
    settings = {"checkpoint": str(checkpoint), "steps": steps} | ({"engine": engine} if engine else {})
    candidate = CandidateSettings.model_validate(settings)
    serving = product.serving.model_copy(update={"dtype": "bfloat16", "concurrency": 64})
    resources = product.resources.model_copy(update={"num_servers": 1})
    changes = {"candidates": {"big": candidate}, "serving": serving, "resources": resources}
    return product.model_copy(update=changes)


def plan(product: TextProduct, machine: Machine) -> dict[tuple[str, str], MemoryNeed]:
    return {(need.activity, need.place): need for need in estimate_needs(product, Path(), machine)}


def need(weights_mib: int, other_mib: int = 100, activity: str = "quantising", place: str = "host") -> MemoryNeed:
    return MemoryNeed("big", "models/big", activity, place, weights_mib, other_mib, "use a larger one", "lower it")


def test_what_fits_is_not_mentioned() -> None:
    assert check_needs([need(900), need(900, place="GPU")], host=Room(4000, 1000), card=Room(1000, 1000)) == []


@pytest.mark.parametrize("place", ["host", "GPU"])
def test_tight_memory_warns_with_numbers_and_a_way_out(place: str) -> None:
    (line,) = check_needs([need(950, place=place)], host=Room(4000, 1000), card=Room(4000, 1000))
    owner = "this machine" if place == "host" else "a GPU"
    wanted = ("candidates.big (models/big)", "1,050 MiB", f"{owner}'s memory", "1,000 MiB are free", "lower it")
    assert all(part in line for part in wanted)
    assert ("others hold 3,000 MiB" in line) == (place == "GPU")  # of the host's memory it would be no news


def test_impossible_weights_are_refused_before_loading() -> None:
    with pytest.raises(SizeError, match=r"candidates\.big.*5,000 MiB for the weights alone.*4,000 MiB; use a"):
        check_needs([need(5000)], host=Room(4000, 3000))
    with pytest.raises(SizeError, match=r"candidates\.big.*a GPU has 4,000 MiB; use a larger one"):
        check_needs([need(5000, place="GPU")], host=Room(9000, 9000), card=Room(4000, 3000))


@pytest.mark.parametrize(
    ("shape", "memory_gib", "is_refused"), [("14b", 48, False), ("70b", 256, False), ("70b", 128, True)]
)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("cards", [(), (80,)], ids=["cpu", "gpu"])
def test_a_quantiser_keeps_weights_on_the_host_as_they_are_stored(
    tmp_path: Path, shape: str, memory_gib: int, is_refused: bool, kind: str, cards: tuple[int, ...]
) -> None:
    machine = make_machine(*cards, memory_gib=memory_gib)
    product = make_product(write_hollow_llama(tmp_path / shape, shape), [STEPS[kind]])
    needs = [n for n in estimate_needs(product, Path(), machine) if n.activity == "quantising"]
    host = Room(machine.memory_mib, machine.memory_mib)
    if is_refused:
        with pytest.raises(SizeError, match="quantising takes 13.,... MiB for the weights alone"):
            check_needs(needs, host=host, card=read_card_room(machine, ()))
    else:
        assert check_needs(needs, host=host, card=read_card_room(machine, ())) == []


@pytest.mark.parametrize("text", ["{broken", "[1]", None])
def test_a_config_that_can_t_be_read_is_one_line(tmp_path: Path, text: str | None) -> None:
    """Estimates are made without a check of the checkpoint, too, and ended in a traceback."""
    folder = write_hollow_llama(tmp_path / "big", "8b")
    (folder / "config.json").write_text(text) if text else (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: expected the model's config"):
        estimate_needs(make_product(folder, []), Path(), make_machine(80))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_hidden_layers", "2", "num_hidden_layers: expected one whole number above 0, got '2'"),
        ("vocab_size", None, "vocab_size: expected one whole number above 0, got None"),
        ("num_attention_heads", True, "num_attention_heads: expected one whole number above 0, got True"),
        ("num_key_value_heads", [8, 4], "num_key_value_heads: expected one whole number above 0, got [8, 4]"),
        ("layer_types", 5, "layer_types: expected a list of names, got 5"),
        ("layer_types", ["full_attention", 1], "layer_types: expected a list of names, got ['full_attention', 1]"),
        ("text_config", [1], "text_config: expected a mapping, got [1]"),
    ],
)
def test_a_config_of_another_type_is_one_line(tmp_path: Path, name: str, value: Any, said: str) -> None:
    """It was a TypeError of a multiplication."""
    folder = write_hollow_llama(tmp_path / "big", "8b", **{name: value})
    with pytest.raises(CheckpointError, match=re.escape(f"config.json: {said}; copy it again")):
        estimate_needs(make_product(folder, []), Path(), make_machine(80))


def test_what_a_config_leaves_open_is_no_error(tmp_path: Path) -> None:
    folder = write_hollow_llama(tmp_path / "big", "8b", num_key_value_heads=None, sliding_window=None, layer_types=None)
    assert plan(make_product(folder, []), make_machine(80))["serving", "GPU"].weights_mib > 14 * GIB


@pytest.mark.parametrize(
    ("memory_gib", "said"),
    [
        (
            24,
            "takes 30,632 MiB for the weights alone of 2 servers and this machine has 24,576 MiB; lower "
            "resources.num_servers, or use a larger machine",
        ),
        (12, "has 12,288 MiB; use a larger machine"),
    ],
)
def test_fewer_servers_are_advised_where_fewer_fit(tmp_path: Path, memory_gib: int, said: str) -> None:
    product = make_product(write_hollow_llama(tmp_path / "8b", "8b"), [])
    product = product.model_copy(update={"resources": product.resources.model_copy(update={"num_servers": 2})})
    host = Room(memory_gib * GIB, memory_gib * GIB)
    with pytest.raises(SizeError, match=re.escape(said)):
        check_needs(estimate_needs(product, Path(), make_machine(memory_gib=memory_gib)), host=host)


def test_timing_on_the_host_has_the_whole_cache_of_both(tmp_path: Path) -> None:
    """A CPU's memory is one place, however many ranks share the heads."""
    engine = {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}
    folder = write_hollow_llama(tmp_path / "8b", "8b")
    one, two = (
        plan(make_pair(folder, engine | {"tensor_parallel_size": n}), make_machine())["timing", "host"] for n in (1, 2)
    )
    assert one.other_mib == two.other_mib


def test_a_head_of_keys_is_not_split_further(tmp_path: Path) -> None:
    """vLLM gives several cards the same one: 8 heads on 16 cards take an eighth of the cache each."""
    folder = write_hollow_llama(tmp_path / "70b", "70b")
    engine = {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}
    eight, sixteen = (
        plan(make_product(folder, [], engine | {"tensor_parallel_size": n}), make_machine(*[80] * 16, build="cpu"))
        for n in (8, 16)
    )
    assert sixteen["serving", "GPU"].other_mib == eight["serving", "GPU"].other_mib
    assert sixteen["serving", "GPU"].weights_mib < eight["serving", "GPU"].weights_mib


def test_a_quantised_block_visits_the_gpu(tmp_path: Path) -> None:
    product = make_product(write_hollow_llama(tmp_path / "8b", "8b"), [STEPS["gptq"]])
    needs = plan(product, make_machine(80))
    # of 8B 3.4 GiB were measured on the card, and 18.3 GiB on the host
    assert 2 * GIB < needs["quantising", "GPU"].weights_mib + needs["quantising", "GPU"].other_mib < 6 * GIB
    assert 16 * GIB < needs["quantising", "host"].weights_mib + needs["quantising", "host"].other_mib < 24 * GIB
    alone = plan(product, make_machine())
    assert ("quantising", "GPU") not in alone
    assert alone["quantising", "host"].other_mib > needs["quantising", "host"].other_mib


def test_gptq_rounds_layers_of_one_shape_together_on_a_gpu(tmp_path: Path) -> None:
    """Gate and up are two of 14,336 x 4,096; down has as many weights in another shape."""
    folder = write_hollow_llama(tmp_path / "8b", "8b")
    gptq, awq = (plan(make_product(folder, [STEPS[kind]]), make_machine(80)) for kind in ("gptq", "awq"))
    hessians = 6 * 4096**2 * 4 + 14_336**2 * 4
    expected = (16 * 14_336 * 4096 + hessians) / 2**20
    assert gptq["quantising", "GPU"].other_mib - awq["quantising", "GPU"].other_mib == pytest.approx(expected, abs=2)


def test_serving_takes_the_card_and_little_of_the_host(tmp_path: Path) -> None:
    needs = plan(make_product(write_hollow_llama(tmp_path / "8b", "8b"), []), make_machine(24))
    card = needs["serving", "GPU"]
    assert card.weights_mib == pytest.approx(15 * GIB, rel=0.02)
    assert card.other_mib > 8 * GIB  # 64 requests of 1,024 tokens
    assert needs["serving", "host"].weights_mib == 0
    small = make_product(tmp_path / "8b", [])
    small = small.model_copy(update={"resources": small.resources.model_copy(update={"kv_cache_gib": 2.0})})
    assert plan(small, make_machine(24))["serving", "GPU"].other_mib == card.other_mib - 6 * GIB
    (line,) = check_needs([card], host=Room(1, 1), card=Room(24 * GIB, 20 * GIB))
    assert "serving.concurrency or serving.context_length" in line and "others hold 4,096 MiB" in line


def test_without_a_usable_gpu_serving_takes_the_host(tmp_path: Path) -> None:
    product = make_product(write_hollow_llama(tmp_path / "8b", "8b"), [])
    for machine in (make_machine(), make_machine(80, build="cpu"), make_machine(0)):
        assert list(plan(product, machine)) == [("serving", "host")]
    hidden = make_machine(80).model_copy(update={"gpus_hidden": True})
    assert list(plan(product, hidden)) == [("serving", "host")]
    assert read_card_room(hidden, (9,)) is None


@pytest.mark.parametrize(("num_servers", "num_cards", "times"), [(2, 1, 2), (2, 2, 1), (3, 2, 2)])
def test_servers_share_cards(tmp_path: Path, num_servers: int, num_cards: int, times: int) -> None:
    product = make_product(write_hollow_llama(tmp_path / "8b", "8b"), [])
    once = plan(product, make_machine(80))["serving", "GPU"].weights_mib
    many = product.resources.model_copy(update={"num_servers": num_servers})
    product = product.model_copy(update={"resources": many})
    shared = plan(product, make_machine(*[80] * num_cards))["serving", "GPU"].weights_mib
    assert shared == pytest.approx(times * once, abs=2)


def test_int4_weights_stay_packed_in_vllm_and_are_unpacked_by_the_embedded_engine(tmp_path: Path) -> None:
    folder = write_hollow_llama(tmp_path / "70b", "70b")
    engine = {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}
    packed = plan(make_product(folder, [STEPS["gptq"]], engine), make_machine(80, memory_gib=256))
    assert packed["serving", "GPU"].weights_mib == pytest.approx(36.8 * GIB, rel=0.01)
    unpacked = plan(make_product(folder, [STEPS["gptq"]]), make_machine(80, memory_gib=256))
    assert unpacked["serving", "GPU"].weights_mib == pytest.approx(131.4 * GIB, rel=0.01)


def test_tensor_parallel_divides_weights_and_cache(tmp_path: Path) -> None:
    engine = {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}
    product = make_product(write_hollow_llama(tmp_path / "70b", "70b"), [], engine)
    machine = make_machine(80, 80, build="cpu")  # vllm has an environment of its own
    whole = plan(product, machine)["serving", "GPU"]
    with pytest.raises(SizeError, match="raise engine.tensor_parallel_size"):
        check_needs([whole], host=Room(1, 1), card=Room(80 * GIB, 80 * GIB))
    split = make_product(tmp_path / "70b", [], engine | {"tensor_parallel_size": 2})
    half = plan(split, machine)["serving", "GPU"]
    assert half.weights_mib == pytest.approx(whole.weights_mib / 2, abs=2)
    assert half.other_mib < 0.6 * whole.other_mib
    with pytest.raises(CheckpointError, match="data_parallel_size 2 takes 4 GPUs, this machine has 2; lower one"):
        plan(make_product(tmp_path / "70b", [], engine | {"tensor_parallel_size": 2, "data_parallel_size": 2}), machine)


def test_a_pipeline_divides_layers_among_cards_as_well(tmp_path: Path) -> None:
    """70B on eight cards of 24 GiB was refused, as if each of two stages held all layers."""
    shared = {"kind": "vllm", "command": ["vllm"], "version": "0.32.0", "tensor_parallel_size": 4}
    stages = shared | {"options": {"pipeline-parallel-size": 2}}
    folder, machine = write_hollow_llama(tmp_path / "70b", "70b"), make_machine(*8 * (24,), build="cpu")
    four, eight = (plan(make_product(folder, [], engine), machine)["serving", "GPU"] for engine in (shared, stages))
    assert eight.weights_mib == pytest.approx(four.weights_mib / 2, abs=2)
    assert eight.other_mib < 0.6 * four.other_mib
    with pytest.raises(CheckpointError, match=r"4 times pipeline-parallel-size 2 .* takes 8 GPUs, this machine has 4"):
        plan(make_product(folder, [], stages), make_machine(*4 * (24,), build="cpu"))


def test_weights_that_vllm_keeps_on_the_host_are_not_the_cards(tmp_path: Path) -> None:
    """70B with 80 GiB of it on the host was refused on a card of 80, as if all of it had to fit there."""
    engine = {"kind": "vllm", "command": ["vllm"], "version": "0.32.0", "options": {"cpu-offload-gb": 80}}
    folder = write_hollow_llama(tmp_path / "70b", "70b")
    needs = plan(make_product(folder, [], engine), make_machine(80, memory_gib=256, build="cpu"))
    assert needs["serving", "GPU"].weights_mib == pytest.approx(51.4 * GIB, rel=0.01)
    assert needs["serving", "host"].weights_mib == 80 * GIB


def make_pair(folder: Path, engine: dict[str, Any] | None = None) -> TextProduct:
    """Return a product that times a candidate against its reference, of 15 GiB each."""
    product = make_product(folder, [], engine)
    candidates = {product.reference: product.candidates["big"], "big": product.candidates["big"]}
    benchmark = product.benchmark.model_copy(update={"candidates": ["big"]})
    return product.model_copy(update={"candidates": candidates, "benchmark": benchmark})


@pytest.mark.parametrize(
    "engine", [None, {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}], ids=["own", "vllm"]
)
def test_two_servers_that_are_timed_share_a_card_or_have_their_own(
    tmp_path: Path, engine: dict[str, Any] | None
) -> None:
    product = make_pair(write_hollow_llama(tmp_path / "8b", "8b"), engine)
    card = plan(product, make_machine(24))["timing", "GPU"]
    assert card.weights_mib == pytest.approx(30 * GIB, rel=0.02)
    with pytest.raises(SizeError, match="big .*timing takes 30,... MiB .*24,576 MiB; take it out of benchmark.can"):
        check_needs([card], host=Room(1, 1), card=Room(24 * GIB, 24 * GIB))
    assert check_needs([card], host=Room(1, 1), card=Room(80 * GIB, 80 * GIB)) == []
    (line,) = check_needs([card], host=Room(1, 1), card=Room(40 * GIB, 40 * GIB))
    assert "requests may wait" in line
    assert ("timing", "GPU") not in plan(product, make_machine(24, 24))
    alone = plan(product, make_machine())
    assert alone["timing", "host"].weights_mib == 2 * alone["serving", "host"].weights_mib


def test_a_vllm_whose_share_is_set_is_not_given_half_of_a_card(tmp_path: Path) -> None:
    folder, engine = tmp_path / "8b", {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}
    product = make_pair(write_hollow_llama(folder, "8b"), engine)
    packed = {
        name: make_product(folder, [STEPS["gptq"]], engine | more).candidates["big"]
        for name, more in {"halved": {}, "set": {"options": {"gpu-memory-utilization": 0.25}}}.items()
    }
    sizes = {}
    for name, candidate in packed.items():
        other = product.model_copy(update={"candidates": product.candidates | {"big": candidate}})
        sizes[name] = plan(other, make_machine(24))["timing", "GPU"].weights_mib
    assert sizes["halved"] == pytest.approx(30 * GIB, rel=0.02)
    assert 15 * GIB < sizes["set"] < 22 * GIB


def test_timing_is_planned_where_both_sides_are_served_here(tmp_path: Path) -> None:
    folder = write_hollow_llama(tmp_path / "8b", "8b")
    product = make_pair(folder)
    untimed = product.model_copy(update={"benchmark": product.benchmark.model_copy(update={"candidates": []})})
    openai = {"kind": "openai", "base_url": "http://localhost:1/v1", "model": "m"}
    elsewhere = make_product(folder, [], openai).candidates["big"]
    attached = product.model_copy(update={"candidates": product.candidates | {product.reference: elsewhere}})
    vllm = make_product(folder, [], {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}).candidates["big"]
    mixed = product.model_copy(update={"candidates": product.candidates | {"big": vllm}})
    for other, machine in (
        (untimed, make_machine(24)),
        (attached, make_machine(24)),
        (mixed, make_machine(24, build="cpu")),
    ):
        assert "timing" not in {activity for activity, _ in plan(other, machine)}


def test_the_smallest_card_and_the_least_free_memory_count() -> None:
    machine = make_machine(80, 24)
    assert read_card_room(machine, (9000, 8000)) == Room(24 * GIB, 8000)
    assert read_card_room(machine, ()) == Room(24 * GIB, 24 * GIB)
