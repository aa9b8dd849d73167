"""What is read of a running vLLM."""

from __future__ import annotations

from pipeline.products.text.serving.vllm_facts import read_drafts
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
