"""Servers are spread over the GPUs that are visible; a fake list stands for the GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.products.text.serving.engines import transformers
from pipeline.products.text.serving.engines.transformers import Place, spread
from pipeline.records.evaluations import Candidate
from tests.fakes.synthetic_records import make_candidate


def test_servers_take_gpus_in_turn_and_know_how_many_share_one() -> None:
    assert spread(2, ("0", "1")) == [Place("0", 1), Place("1", 1)]
    assert spread(3, ("GPU-a", "GPU-b")) == [Place("GPU-a", 2), Place("GPU-b", 1), Place("GPU-a", 2)]
    assert spread(1, ("4", "5")) == [Place("4", 1)]
    assert spread(2, ()) == [Place(None, 2)] * 2
    assert spread(2, ("0", "1"), num_engines=2) == [Place("0", 2), Place("1", 2)]
    assert spread(1, (), num_engines=2) == [Place(None, 2)]


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
