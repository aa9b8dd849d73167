"""How the benchmark reads configurations and sums up rounds."""

from __future__ import annotations

from benchmarks.endpoint_throughput import build_speed, format_speed, read_settings


def test_settings_are_json_or_words() -> None:
    assert read_settings("use_cuda_graph=true, num_blocks=64,attention=paged|sdpa") == {
        "use_cuda_graph": True,
        "num_blocks": 64,
        "attention": "paged|sdpa",
    }
    assert read_settings("") == {}


def test_the_best_round_counts_and_a_failure_is_a_row() -> None:
    rounds = [{"tokens_per_s": speed, "busy": busy, "memory_gib": 2.0} for speed, busy in ((10.0, 0.5), (20.0, 0.75))]
    speed = build_speed("library", rounds)
    assert (speed.best, speed.busy) == (20.0, 0.75)
    assert "busy  75%    2.0 GiB  library  [10 20]" in format_speed(speed)
    failed = build_speed("library", [], "not done after 9 s")
    assert failed.best == 0
    assert format_speed(failed).endswith("not done after 9 s")
