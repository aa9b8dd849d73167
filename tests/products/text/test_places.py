"""Servers are spread over the GPUs that are visible; a fake list stands for the GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.products.text.serving.engines import transformers, vllm
from pipeline.products.text.serving.engines.engine import ServerLaunch
from pipeline.products.text.serving.engines.transformers import Place, spread
from pipeline.products.text.settings import ResourceSettings
from pipeline.records.evaluations import Candidate
from tests.fakes.synthetic_records import make_candidate


def test_servers_take_gpus_in_turn_and_know_how_many_share_one() -> None:
    assert spread(2, ("0", "1")) == [Place("0", 1), Place("1", 1)]
    assert spread(3, ("GPU-a", "GPU-b")) == [Place("GPU-a", 2), Place("GPU-b", 1), Place("GPU-a", 2)]
    assert spread(1, ("4", "5")) == [Place("4", 1)]
    assert spread(2, ()) == [Place(None, 2)] * 2
    assert spread(2, ("0", "1"), num_engines=2) == [Place("0", 2), Place("1", 2)]
    assert spread(1, (), num_engines=2) == [Place(None, 2)]


def test_the_second_engine_takes_gpus_that_the_first_left() -> None:
    assert spread(1, ("0", "1"), num_engines=2) == [Place("0", 1)]
    assert spread(1, ("0", "1"), num_engines=2, engine_index=1) == [Place("1", 1)]
    assert spread(1, ("0",), num_engines=2, engine_index=1) == [Place("0", 2)]
    assert spread(2, ("0", "1", "2"), num_engines=2, engine_index=1) == [Place("2", 1), Place("0", 2)]


@pytest.mark.parametrize(
    ("gpus", "options", "visible", "fraction"),
    [
        (("0",), {}, None, "0.45"),
        (("0",), {"gpu-memory-utilization": 0.3}, None, None),
        (("0", "1"), {}, "1", None),
        (("0", "1"), {"tensor-parallel-size": 2}, None, "0.45"),
        (("4", "5", "6", "7"), {"tensor-parallel-size": 2}, "6,7", None),
        (("0", "1", "2", "3"), {"tensor-parallel-size": 2, "data-parallel-size": 2}, None, "0.45"),
        ((), {}, None, None),
    ],
)
def test_a_second_vllm_gets_gpus_of_its_own_or_half_of_each(
    gpus: tuple[str, ...], options: dict[str, Any], visible: str | None, fraction: str | None
) -> None:
    environment, arguments = vllm.divide_gpus(gpus, options, num_engines=2, engine_index=1)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible
    assert arguments == (["--gpu-memory-utilization", fraction] if fraction else [])


def test_a_vllm_that_is_alone_is_started_as_it_would_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def spawn(command: list[str], *, environment: dict[str, str], **_: Any) -> None:
        started.append((command, environment))

    monkeypatch.setattr(vllm, "spawn", spawn)
    monkeypatch.setattr(vllm, "find_gpus", lambda: (None,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    resources = ResourceSettings(num_servers=1, request_timeout_s=1, start_timeout_s=1)
    for num_engines in (1, 2):
        launch = ServerLaunch(make_candidate("a"), resources, {}, tmp_path, tmp_path, num_engines=num_engines)
        vllm._spawn(launch, tmp_path / "vllm.yaml", 1)
    (alone, _), (shared, _) = started
    assert shared == [*alone, "--gpu-memory-utilization", "0.45"]


def test_a_server_sees_its_own_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[dict[str, Any], dict[str, str]]] = []

    def spawn(command: list[str], *, environment: dict[str, str], **_: Any) -> None:
        started.append((json.loads(command[-1]), environment))

    monkeypatch.setattr(transformers, "spawn", spawn)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    candidate: Candidate = make_candidate("a")
    for place in (Place("GPU-b", 2), Place()):
        transformers._spawn(candidate, root=tmp_path, log=tmp_path / "log", place=place, kv_cache_gib=1.5)
    (asked, environment), (_, unchanged) = started
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert (asked["num_sharing"], asked["kv_cache_gib"]) == (2, 1.5)
    assert unchanged["CUDA_VISIBLE_DEVICES"] == "3,4"
