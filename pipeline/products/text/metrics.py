"""The metrics of each eval of texts."""

from __future__ import annotations

from pipeline.settings.metrics import MetricDefinition

_FIRST_DIVERGENCE = MetricDefinition("output_divergence_rate", "proportion", "diverged", "lower", "", is_gated=False)

PERPLEXITY = (
    MetricDefinition("perplexity_per_token", "ratio", "nll_nats", "lower", "", harm="relative", weight="num_tokens"),
    MetricDefinition("bits_per_byte", "ratio", "nll_bits", "lower", "bit/byte", weight="num_bytes"),
    MetricDefinition(
        "kl_nats_per_token", "ratio", "kl_nats", "lower", "nat/token", weight="num_tokens", is_gated=False
    ),
    MetricDefinition("top1_change_rate", "ratio", "num_top1_changes", "lower", "", weight="num_tokens", is_gated=False),
)
HARNESS = (MetricDefinition("accuracy", "proportion", "accuracy", "higher", "", is_choice=True),)
TOOL_CALLS = (
    MetricDefinition("tool_call_exact_match", "proportion", "exact", "higher", ""),
    MetricDefinition("tool_call_accepted_rate", "proportion", "accepted", "higher", ""),
    _FIRST_DIVERGENCE,
)
TRAJECTORIES = (MetricDefinition("task_completion_rate", "proportion", "completed", "higher", ""), _FIRST_DIVERGENCE)
