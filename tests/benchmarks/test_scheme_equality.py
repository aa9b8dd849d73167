"""What the comparison of libraries counts, and which error of a log it names."""

from __future__ import annotations

from benchmarks.scheme_equality import compare, find_error


def test_it_counts_answers_and_takes_the_largest_distance_of_a_token() -> None:
    ours = {"texts": ["a", "b"], "scores": [[-1.0, -2.0], [-3.0]]}
    theirs = {"texts": ["a", "c"], "scores": [[-1.0, -2.5], [-2.9]]}
    assert compare(ours, theirs) == ["1 of 2", "5.0e-01"]
    assert compare(ours, ours) == ["0 of 2", "0.0e+00"]


def test_the_first_error_of_a_log_is_named() -> None:
    log = "INFO start\n(worker) ValueError: no kernel\nTraceback\nRuntimeError: Engine core failed"
    assert find_error(log) == "ValueError: no kernel"
    assert find_error("killed") == "killed"
