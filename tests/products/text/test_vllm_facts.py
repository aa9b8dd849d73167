"""What is read of a running vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeline.products.text.serving.vllm_facts import read_drafts, read_kernels
from pipeline.products.text.settings import KERNEL_REPORT
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig

METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:generation_tokens_total{engine="0",model_name="a"} 60.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 15.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a"} 5.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 13.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 4.0
"""
DRAFTS = SpeculativeConfig(method="prompt_lookup", num_tokens=2)


def test_drafts_are_counted_over_all_engines() -> None:
    assert read_drafts(METRICS, DRAFTS) == SpeculationCounts(
        method="prompt_lookup",
        num_tokens=2,
        num_target_forwards=47,
        num_completion_tokens=60,
        num_drafted=20,
        accepted_by_position=(9, 4),
    )


def test_a_server_that_drafted_nothing_has_no_counts() -> None:
    assert read_drafts("vllm:generation_tokens_total 60.0\n", DRAFTS) is None


class FakeClient:
    def __init__(self, *reports: dict[str, Any]) -> None:
        self.reports = reports

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert (path, body) == ("/collective_rpc", {"method": "report_kernels"})
        return {"results": list(self.reports)}


@pytest.mark.parametrize(
    ("reports", "kernels"),
    [
        ([{"A": {"K": 2}}] * 2, {"A": {"K": 2}}),
        ([{"A": {"K": 2}}, {"A": {"L": 2}}], {"worker 0": {"A": {"K": 2}}, "worker 1": {"A": {"L": 2}}}),
    ],
    ids=["alike", "unlike"],
)
def test_workers_that_dispatched_alike_are_told_once(reports: list[dict[str, Any]], kernels: dict[str, Any]) -> None:
    client: Any = FakeClient(*reports)
    info = {"vllm_config": {"parallel_config": {"worker_extension_cls": KERNEL_REPORT}}}
    assert asyncio.run(read_kernels(client, info)) == {"kernels": kernels}


@pytest.mark.parametrize("info", [{}, {"vllm_config": None}, {"vllm_config": {"parallel_config": {}}}])
def test_a_server_whose_workers_cannot_say_is_not_asked(info: dict[str, Any]) -> None:
    client: Any = FakeClient()
    assert asyncio.run(read_kernels(client, info)) == {}
