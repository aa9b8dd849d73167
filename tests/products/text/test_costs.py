"""What a run will cost: from headers alone, or from the last run, and right within the factor that it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.params import get_product, load_params
from pipeline.products.text import costs
from pipeline.products.text.costs import Cost, plan_costs, render_costs
from pipeline.products.text.optimize.layers import count_output_bytes
from pipeline.products.text.settings import CandidateSettings, TextProduct
from pipeline.products.text.step_settings import Calibration, QuantizeStep
from pipeline.records.evaluations import BuiltCandidate, Checkpoint, Evaluation
from pipeline.records.record_files import write_record
from pipeline.records.serving import ServingConfig
from pipeline.running.environment import Gpu, Machine
from tests.fakes.hollow_llama import write_hollow_llama
from tests.paths import ROOT

STEP = QuantizeStep(
    kind="gptq", calibration=Calibration(sources=["prose"], num_samples=512, max_tokens=512, length_exponent=0.0)
)
SMALL = Machine(
    os="Linux",
    cpu="",
    instruction_sets=(),
    num_cores=2,
    memory_mib=8 << 10,
    num_torch_threads=2,
    torch_build="cpu",
)
H200 = SMALL.model_copy(
    update={
        "memory_mib": 256 << 10,
        "torch_build": "cuda 13.0",
        "gpus": (Gpu(name="NVIDIA H200", driver="1", memory_mib=141 << 10),),
    }
)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> TextProduct:
    monkeypatch.chdir(ROOT)
    return get_product(load_params(), "agent", kind=TextProduct)


def resize(product: TextProduct, **folders: Path) -> TextProduct:
    """Return the product with a dense and a quantised candidate for each folder."""
    candidates = {}
    for name, folder in folders.items():
        candidates[name] = CandidateSettings(checkpoint=str(folder), steps=[])
        candidates[f"{name}-int4"] = CandidateSettings(checkpoint=str(folder), steps=[STEP])
    serving = product.serving.model_copy(update={"dtype": "bfloat16"})
    return product.model_copy(update={"candidates": candidates, "reference": next(iter(folders)), "serving": serving})


def plan(product: TextProduct, machine: Machine, build: Path) -> dict[str, Cost]:
    return {cost.candidate: cost for cost in plan_costs(product, Path(), machine, build=build)}


def test_70b_is_planned_from_headers_alone(product: TextProduct, tmp_path: Path) -> None:
    folders = {shape: write_hollow_llama(tmp_path / shape, shape) for shape in ("8b", "70b")}
    costs = plan(resize(product, **folders), H200, tmp_path)
    dense, made, small = costs["70b"], costs["70b-int4"], costs["8b-int4"]
    assert (dense.build_minutes, dense.disk_gib) == (0, 0)
    assert 35 < made.disk_gib < 42 and 130 < made.host_gib < 160
    assert dense.host_gib < 10 and dense.card_gib > 131
    assert made.build_minutes > 5 * small.build_minutes and dense.minutes > 2 * costs["8b"].minutes
    assert 100 / 3 < 60 * small.build_minutes < 100 * 3  # seconds that an H200 took, with samples of another size
    assert {cost.source for cost in costs.values()} == {"a guess"}


def test_the_canary_is_part_of_the_guess(product: TextProduct, tmp_path: Path) -> None:
    """With few cases it is most of a run, which was guessed at no minute. 8B took an H100 163 s, 79 of them for it."""
    shaped = resize(product, **{"8b": write_hollow_llama(tmp_path / "8b", "8b")})
    assert 163 / 3 < 60 * plan(shaped, H200, tmp_path)["8b"].minutes < 163 * 3
    few = shaped.model_copy(update={"canary": shaped.canary.model_copy(update={"num_prompts": 8})})
    assert plan(few, H200, tmp_path)["8b"].minutes < plan(shaped, H200, tmp_path)["8b"].minutes - 1
    evals = {"prose": product.evals["prose"]}
    texts = [shaped.model_copy(update={"evals": evals}), few.model_copy(update={"evals": evals})]
    assert len({plan(each, H200, tmp_path)["8b"].minutes for each in texts}) == 1, "no canary without answers"


def test_cases_are_read_once_for_all_candidates(
    product: TextProduct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of a dozen candidates read 50,000 cases a dozen times: minutes of nothing else."""
    read: list[Path] = []

    def note(folder: Path) -> Evalset:
        read.append(folder)
        return load_evalset(folder)

    monkeypatch.setattr(costs, "load_evalset", note)
    folders = {name: write_hollow_llama(tmp_path / name, "8b") for name in ("one", "two")}
    assert {cost.source for cost in plan(resize(product, **folders), H200, tmp_path).values()} == {"a guess"}
    assert len(read) == len(set(read)) > 1


def test_packed_layers_take_a_quarter_and_their_scales(tmp_path: Path) -> None:
    folder = write_hollow_llama(tmp_path / "8b", "8b")
    linears = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336)
    embeddings = 2 * 128_256 * 4096 * 2
    packed = linears // 2 + linears // 128 * 2 + 32 * 7 * 16
    assert count_output_bytes(folder, STEP) == embeddings + packed


@pytest.fixture
def sized(product: TextProduct, tmp_path: Path) -> TextProduct:
    """A product of three sizes."""
    return resize(product, **{shape: write_hollow_llama(tmp_path / shape, shape) for shape in ("8b", "14b", "70b")})


def leave_run(build: Path, *, num_bytes: int = 2 * 8_030_000_000, digest: str = "a", **serving: Any) -> None:
    """Write what a run of candidate `8b` leaves in `build/`: ten minutes."""
    checkpoint = Checkpoint(
        path="8b", kind="llama", format="dense", dtype="bfloat16", num_parameters=1, num_bytes=num_bytes, digest="a"
    )
    write_record(build / "candidates/8b/candidate.json", BuiltCandidate(name="8b", checkpoint=checkpoint))
    evaluation = Evaluation(
        candidate="8b",
        fingerprint="f",
        checkpoint_digest=digest,
        serving=ServingConfig(**{"dtype": "bfloat16"} | serving),
        evals={},
        served_by={},
        seconds=600.0,
    )
    write_record(build / "evaluations/8b/evaluation.json", evaluation)


def test_minutes_are_the_last_runs_scaled_by_the_weights(sized: TextProduct, tmp_path: Path) -> None:
    leave_run(tmp_path)
    costs = plan(sized, H200, tmp_path)
    assert (costs["8b"].minutes, costs["8b"].source) == (10, "last run of 8b")
    assert costs["14b"].minutes == pytest.approx(10 * 14.8 / 8.03, rel=0.1)
    assert costs["14b"].source == "last run of 8b"
    assert "last run of 8b" in render_costs(list(costs.values()))


def test_minutes_of_what_a_step_packed_are_its_own(sized: TextProduct, tmp_path: Path) -> None:
    """INT4 holds a third of the bytes that it was made of."""
    packed = sized.model_copy(
        update={"candidates": {"8b": sized.candidates["8b-int4"], "70b": sized.candidates["70b"]}}
    )
    leave_run(tmp_path, num_bytes=count_output_bytes(tmp_path / "8b", STEP))
    assert plan(packed, H200, tmp_path)["8b"].source == "last run of 8b"


def test_a_run_of_another_size_says_nothing(sized: TextProduct, tmp_path: Path) -> None:
    """70B was to take 0.2 minutes on two cores: as long as the tiny model that had its name before."""
    leave_run(tmp_path)
    assert plan(sized, H200, tmp_path)["70b"].source == "a guess"
    leave_run(tmp_path, num_bytes=5_642_800)
    assert {cost.source for cost in plan(sized, H200, tmp_path).values()} == {"a guess"}


@pytest.mark.parametrize(
    "other",
    [
        {"digest": "b"},
        {"engine": "vllm"},
        {"dtype": "float32"},
        {"options": {"tensor-parallel-size": 2}},
        {"options": {"pipeline-parallel-size": 2}},
    ],
    ids=["weights", "engine", "dtype", "cards", "stages"],
)
def test_a_run_by_another_path_says_nothing(sized: TextProduct, tmp_path: Path, other: dict[str, Any]) -> None:
    leave_run(tmp_path, **other)
    assert plan(sized, H200, tmp_path)["8b"].source == "a guess"


def test_a_guess_knows_how_the_weights_are_split_and_packed(product: TextProduct, tmp_path: Path) -> None:
    """70B on four cards was guessed as on one, in INT4 as in bfloat16."""
    folder = str(write_hollow_llama(tmp_path / "70b", "70b"))
    vllm = {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}
    four = vllm | {"tensor_parallel_size": 4}
    candidates = {
        name: CandidateSettings.model_validate({"checkpoint": folder, "steps": steps, "engine": engine})
        for name, steps, engine in (("one", [], vllm), ("four", [], four), ("packed", [STEP.model_dump()], four))
    }
    shaped = resize(product, big=Path(folder)).model_copy(update={"candidates": candidates, "reference": "one"})
    cards = H200.model_copy(update={"gpus": H200.gpus * 4})
    minutes = {name: cost.minutes for name, cost in plan(shaped, cards, tmp_path).items()}
    assert minutes["one"] > 2 * minutes["four"] and minutes["four"] > 1.2 * minutes["packed"]


def test_without_a_gpu_a_table_names_none_of_its_memory(product: TextProduct, tmp_path: Path) -> None:
    costs = plan(product, SMALL, tmp_path)
    assert not any(cost.card_gib for cost in costs.values())
    assert "–" in render_costs(list(costs.values()))


def test_long_times_have_no_digits_that_nobody_knows() -> None:
    cost = Cost("a", 438_631.8, 1932.04, "a guess", 1.0, 0.0, 0.0)
    assert "438,632" in render_costs([cost]) and "1,932 " in render_costs([cost])
