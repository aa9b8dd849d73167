"""The report of a network product: what it costs, what an average hides, and pictures that never stop a judgement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image, ImageDraw

from pipeline.errors import EvidenceError
from pipeline.gate.checks import check_outcomes
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.verdicts import is_blocking
from pipeline.products import KINDS
from pipeline.products.vision.show import plots as network_plots
from pipeline.products.vision.show.boxes import FOUND, Found, draw_boxes, find_lost, list_losses, read_found
from pipeline.products.vision.show.costs import tabulate_network_costs
from pipeline.products.vision.show.seams import cut_strip
from pipeline.products.vision.show.sections import describe_fallbacks
from pipeline.records.detections import Detections, Objects, match_image
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import CaseRecord, Evaluation, Fallback
from pipeline.records.record_files import read_record, write_record
from pipeline.records.serving import Tiling
from pipeline.records.verdicts import Verdict
from pipeline.report.explanation_records import Explanation
from pipeline.report.flips import worst_cases
from pipeline.report.github import render_summary
from pipeline.report.pictures.images import LARGEST_SHOWN, crop_most_different
from pipeline.report.pictures.worst import list_worst_images
from pipeline.report.terminal import render_gate
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.synthetic_detections import Change
from tests.fakes.synthetic_networks import (
    NOTES,
    REFERENCE,
    TILE,
    Way,
    compile_notes,
    make_network_product,
    make_people,
    time_notes,
    write_detector,
    write_upscaler,
)

COMPILED = {"kind": "compile", "mode": "default"}
LAST = {"kind": "channels_last"}
HALF = {"kind": "precision", "dtype": "bfloat16"}
TILED = {"kind": "tiling", "tile": TILE, "overlap": 0.0, "window": "none"}
POLICY = {
    "kind": "conv_policy",
    "algorithm": "winograd_f43",
    "dtype": "float16",
    "rules": [
        {"layers": ["branches.*"], "algorithm": "direct", "dtype": "float16", "reason": "F(4,3) leaves | no room"}
    ],
}
OVERFLOW = {
    "layers": {
        "stem": {"relative_error": 0.01, "absmax": 1.0, "nonfinite_count": 0, "headroom_bits": 2.0},
        "a|b": {"relative_error": None, "absmax": None, "nonfinite_count": 3, "headroom_bits": None},
        "head": {"relative_error": 0.5, "absmax": None, "nonfinite_count": 1, "headroom_bits": None},
    }
}
LOSING = Change(score=0, box=0, drop_small=0.6)
FORGED = "x</b>\n# `PASS`|](http://a)"
WAYS = {
    "policy": Way([POLICY], notes=OVERFLOW | {"peak_mib": None}, by=LOSING),
    "compiled": Way(
        [COMPILED],
        by=Change(score=0, box=0),
        notes={"speed": time_notes(), "compile": compile_notes(num_recompilations=2, first_call_s=1.25)},
    ),
    "last": Way(
        [{"kind": "channels_last"}],
        by=Change(score=0, box=0),
        notes={
            "speed": time_notes(high=0.99),
            "layout": {"other_formats": ["head"], "num_reorders": {"first": 9, "last": 1}},
        },
    ),
}


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every candidate of WAYS on images of many large objects and few small ones."""
    root, rng = tmp_path_factory.mktemp("detector"), np.random.default_rng(2)
    objects = [make_people(rng, num_large=9, num_small=i % 2) for i in range(140)]
    return write_detector(root, make_network_product("detector", WAYS), WAYS, objects=objects)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same candidates on few images, to be damaged."""
    root = tmp_path_factory.mktemp("small")
    return write_detector(root, make_network_product("detector", WAYS), WAYS, num_images=12)


@pytest.fixture(scope="module")
def judged(detector: Path) -> ReleaseComparison:
    return compare_release(make_network_product("detector", WAYS), detector)


def judge_upscaler(root: Path, ways: dict[str, Way], plain: dict[str, Any] | None = None) -> ReleaseComparison:
    product = make_network_product("upscaler", ways)
    return compare_release(product, write_upscaler(root, product, {REFERENCE: Way(notes=plain or {}), **ways}))


def costs_of(compared: ReleaseComparison, name: str) -> dict[str, str]:
    head, _, *rows = tabulate_network_costs(compared)
    return dict(zip(head, next(row for row in rows if row[0] == f"`{name}`"), strict=True))


def test_an_average_that_hides_small_objects_is_said_first(judged: ReleaseComparison) -> None:
    """AP over all objects moves within its tolerance, as few of them are small: the number that people look at."""
    verdict = judged.judgement.verdicts[0]
    outcomes = {c.metric: c.outcome for c in verdict.comparisons if c.tolerance}
    assert outcomes["scenes/ap"] != "fail" and outcomes["scenes/ap_small"] == "fail"
    report = render_report(judged)
    start = "aggregate flat, small objects down: policy moves scenes/ap by "
    assert report.index(f"- {start.capitalize()}") < report.index("| candidate |")
    assert f"  {start}" in render_gate(judged.judgement)


def test_no_gain_is_a_verdict_and_stands_in_the_table_of_costs(judged: ReleaseComparison) -> None:
    outcomes = {v.candidate: v.outcome for v in judged.judgement.verdicts}
    assert outcomes == {"policy": "fail", "compiled": "pass", "last": "no gain"}
    report = render_report(judged)
    assert "## `last`: ➖ no gain" in report
    assert "- no gain: channels_last: it takes 0.700 (0.650 to 0.990) of the CPU time of torch float32" in report
    assert costs_of(judged, "last")["gain"] == "**no gain**" and costs_of(judged, "compiled")["gain"] == "yes"
    assert "NO GAIN" in render_gate(judged.judgement)


def test_costs_say_what_was_measured_and_nothing_of_an_emulation(judged: ReleaseComparison) -> None:
    policy, compiled, last = (costs_of(judged, name) for name in ("policy", "compiled", "last"))
    assert policy["time to its baseline"] == policy["peak, MiB"] == "–"
    assert policy["largest relative error"] == "not finite in <code>a&#124;b</code>", "the first that overflowed"
    assert policy["least headroom, doublings"] == "overflow in <code>a&#124;b</code>"
    assert compiled["time to its baseline"] == "0.700 (0.650 to 0.750) CPU"
    assert compiled["graphs / graph breaks / recompilations / first call"] == "3 / 0 / 2 / 1.2 s"
    assert (last["modules in another format"], last["reorders"]) == ("1", "9 → 1")
    assert "work" not in last, "nothing is tiled: a column of nothing"
    report = render_report(judged)
    assert "**a convolution policy is emulated**" in report and "**work**" not in report


@pytest.mark.parametrize(("difference", "said"), [(None, "are not finite"), (0.3, "differ by 0.3 of their standard")])
def test_what_was_not_timed_says_why(tmp_path: Path, difference: float | None, said: str) -> None:
    speed = time_notes() | {"timed": None, "difference": difference}
    compared = judge_upscaler(tmp_path, {"compiled": Way([COMPILED], notes={"speed": speed})})
    assert said in costs_of(compared, "compiled")["time to its baseline"]
    assert compared.judgement.verdicts[0].outcome == "no gain" and said in list_said(compared.judgement.verdicts[0])[0]


SLOW = time_notes(median=9.0, low=8.0, high=10.0)


def judge_slow(root: Path, way: Way, **gate: Any) -> Verdict:
    product = make_network_product("upscaler", {"slow": way}, **gate)
    compared = compare_release(product, write_upscaler(root, product, {REFERENCE: Way(), "slow": way}))
    check_outcomes(compared.judgement)
    return compared.judgement.verdicts[0]


def test_a_step_that_gains_on_something_slow_alone_is_no_gain(tmp_path: Path) -> None:
    """Channels-last took a fifth of the time of bfloat16 without it, and nine times that of float32: it passed."""
    for speed in (None, time_notes() | {"baseline": "torch bfloat16"}):
        verdict = judge_slow(tmp_path / str(speed is None), Way([HALF, LAST], notes={"speed": speed, "total": SLOW}))
        assert verdict.outcome == "no gain"
        assert list_said(verdict)[0] == (
            "no gain: channels_last: it takes 9.000 (8.000 to 10.000) of the CPU time of torch float32: it is slower "
            "than without any step"
        )


def test_the_time_in_total_stands_in_the_table_of_what_was_timed_no_further(tmp_path: Path) -> None:
    compared = judge_upscaler(tmp_path, {"slow": Way([HALF, LAST], notes={"speed": None, "total": SLOW})})
    assert costs_of(compared, "slow")["in total"] == "9.000 (8.000 to 10.000) CPU"
    assert costs_of(compared, "slow")["gain"] == "**no gain**"


@pytest.mark.parametrize(
    ("max_slowdown", "outcome", "said"),
    [
        (None, "pass", "note: speed: it takes 9.000 (8.000 to 10.000) of the time of the reference in float32 without"),
        (8.0, "pass", "note: speed: it takes 9.000"),
        (
            6.9,
            "fail",
            "fail: speed: it takes 9.000 (8.000 to 10.000) of the time of the reference in float32 without a "
            "step, expected at most 7.9 (gate.max_slowdown)",
        ),
    ],
)
def test_a_number_format_that_is_slow_fails_where_that_matters(
    tmp_path: Path, max_slowdown: float | None, outcome: str, said: str
) -> None:
    way = Way([HALF], notes={"speed": SLOW, "total": SLOW})
    verdict = judge_slow(tmp_path, way, max_slowdown=max_slowdown)
    assert verdict.outcome == outcome and list_said(verdict)[0].startswith(said)


def test_users_wait_by_the_wall_clock_too(tmp_path: Path) -> None:
    """A candidate that lost its threads took no more CPU time, and three times as long."""
    waits = time_notes() | {"timed": SLOW["timed"] | {"cpu": {"ratio": {"median": 0.8, "low": 0.75, "high": 0.85}}}}
    way = Way([HALF], notes={"speed": waits, "total": waits})
    assert judge_slow(tmp_path / "a", way, max_slowdown=0.2).outcome == "fail"
    others: dict[str, dict[str, Any]] = {
        "b": {"speed": time_notes(), "total": waits},
        "c": {"speed": waits, "total": None},
    }
    for name, notes in others.items():
        both = judge_slow(tmp_path / name, Way([HALF, LAST], notes=notes))
        assert both.outcome == "no gain"
        assert "it takes 9.000 (8.000 to 10.000) of the wall time of torch float32" in list_said(both)[0]
    compared = judge_upscaler(tmp_path / "d", {"slow": way})
    assert costs_of(compared, "slow")["in total"] == "9.000 (8.000 to 10.000) wall"


def test_a_limit_on_time_that_was_not_applied_is_said_where_the_verdict_is(tmp_path: Path) -> None:
    """It stood in the report alone: at the terminal an emulated candidate had kept a limit that nothing measured."""
    ways = {"policy": Way([POLICY])}
    product = make_network_product("upscaler", ways, max_slowdown=0.2)
    judgement = compare_release(product, write_upscaler(tmp_path, product, ways)).judgement
    check_outcomes(judgement)
    said = "speed: gate.max_slowdown was not applied: an emulated policy has no time of its own"
    assert judgement.outcome == "pass" and f"note: {said}" in list_said(judgement.verdicts[0])
    assert f"policy: note: {said}" in render_gate(judgement)
    assert said in render_summary(judgement, Explanation(candidates=()))


@pytest.mark.parametrize("num_kernel_calls", [3, 4])
def test_a_release_on_emulated_int8_needs_a_reason(tmp_path: Path, num_kernel_calls: int) -> None:
    """It was a note, so INT8 that no kernel ran could ship as if one had."""
    int8 = {"num_layers": 4, "num_kernel_calls": num_kernel_calls, "num_float_calls": 0, "implementations": []}
    ways = {"int8": Way(notes={"int8": int8}, checkpoint="models/int8")}
    product = make_network_product("upscaler", ways)
    build = write_upscaler(tmp_path, product, ways)
    verdict = compare_release(product, build).judgement.verdicts[0]
    if num_kernel_calls == 4:
        assert verdict.outcome == "pass"
        return
    assert verdict.outcome == "refused" and "evaluate it where INT8 has kernels" in list_said(verdict)[0]
    allowed = product.model_copy(update={"allow_emulated": "the target was measured"})
    verdict = compare_release(allowed, build).judgement.verdicts[0]
    assert verdict.outcome == "pass" and any("allowed, as the target was measured" in s for s in list_said(verdict))


def test_tiles_alone_are_timed_or_refused_where_there_is_a_limit(tmp_path: Path) -> None:
    """An overlap of a half is four times the work, and was let through with a note."""
    assert judge_slow(tmp_path / "untimed", Way([TILED]), max_slowdown=0.2).outcome == "refused"
    assert judge_slow(tmp_path / "slow", Way([TILED], notes={"total": SLOW}), max_slowdown=0.2).outcome == "fail"
    assert judge_slow(tmp_path / "unlimited", Way([TILED])).outcome == "pass"


def test_a_slow_candidate_is_none_that_passes_by_an_edit(tmp_path: Path) -> None:
    way = Way([HALF], notes={"speed": SLOW, "total": SLOW})
    product = make_network_product("upscaler", {"slow": way}, max_slowdown=0.2)
    judgement = compare_release(product, write_upscaler(tmp_path, product, {"slow": way})).judgement
    passed = judgement.verdicts[0].model_copy(update={"outcome": "pass", "reasons": ()})
    with pytest.raises(EvidenceError, match="slow: the verdict contradicts"):
        check_outcomes(judgement.model_copy(update={"verdicts": (passed,)}))


def test_a_limit_on_time_refuses_what_could_not_be_timed(tmp_path: Path) -> None:
    untimed = time_notes() | {"timed": None, "difference": 0.3}
    way = Way([HALF], notes={"speed": untimed, "total": untimed})
    verdict = judge_slow(tmp_path, way, max_slowdown=0.2)
    assert (
        verdict.outcome == "refused" and "gate.max_slowdown: not timed, as its outputs differ" in list_said(verdict)[0]
    )


def test_a_limit_on_time_refuses_notes_without_it(tmp_path: Path) -> None:
    """Nobody knows how long it takes, and it passed."""
    way = Way([HALF], notes={"speed": None, "total": None})
    verdict = judge_slow(tmp_path, way, max_slowdown=0.2)
    assert verdict.outcome == "refused" and "gate.max_slowdown: expected the time in total" in list_said(verdict)[0]
    assert judge_slow(tmp_path / "unlimited", way).outcome == "pass"
    product = make_network_product("upscaler", {"slow": way}, max_slowdown=0.2)
    timed = Way([HALF], notes={"speed": time_notes(), "total": time_notes()})
    judgement = compare_release(product, write_upscaler(tmp_path / "timed", product, {"slow": timed})).judgement
    assert judgement.outcome == "pass"
    without = judgement.verdicts[0].model_copy(update={"total": None})
    with pytest.raises(EvidenceError, match="slow: the verdict contradicts"):
        check_outcomes(judgement.model_copy(update={"verdicts": (without,)}))


@pytest.mark.parametrize("steps", [[], [HALF], [HALF, LAST]], ids=["no-step", "number-format", "for-speed"])
def test_another_checkpoint_is_timed_or_refused_where_there_is_a_limit(tmp_path: Path, steps: list[Any]) -> None:
    """What every INT8 artefact is, a checkpoint of its own without a step, had no time and passed without a note."""

    def way(total: Any) -> Way:
        return Way(steps, notes={"speed": time_notes(), "total": total}, checkpoint="models/int8")

    untimed = judge_slow(tmp_path / "untimed", way(None), max_slowdown=0.25)
    assert untimed.outcome == "refused" and "gate.max_slowdown: expected the time in total" in list_said(untimed)[0]
    slow = judge_slow(tmp_path / "slow", way(SLOW), max_slowdown=0.25)
    assert slow.outcome == "fail"
    assert "fail: speed: it takes 9.000 (8.000 to 10.000) of the time of the reference in float32" in list_said(slow)[0]
    assert judge_slow(tmp_path / "fast", way(time_notes()), max_slowdown=0.25).outcome == "pass"
    if not steps:
        assert judge_slow(tmp_path / "unlimited", way(None)).outcome == "pass"


def test_another_checkpoint_without_a_time_is_none_that_passes_by_an_edit(tmp_path: Path) -> None:
    """The steps do not tell that it had to be timed."""
    way = Way(notes={"total": time_notes()}, checkpoint="models/int8")
    product = make_network_product("upscaler", {"int8": way}, max_slowdown=0.25)
    judgement = compare_release(product, write_upscaler(tmp_path, product, {"int8": way})).judgement
    assert judgement.outcome == "pass"
    without = judgement.verdicts[0].model_copy(update={"total": None})
    with pytest.raises(EvidenceError, match="int8: the verdict contradicts"):
        check_outcomes(judgement.model_copy(update={"verdicts": (without,)}))


def test_a_network_that_is_not_compiled_for_all_shapes_is_a_fallback_and_no_gain(tmp_path: Path) -> None:
    """It ran without compilation on most pictures, and passed as compiled by the time of the first shape."""
    met = compile_notes(num_recompilations=7, num_shapes=12, num_over_limit=1, shape_over_limit=9)
    compared = judge_upscaler(tmp_path, {"compiled": Way([COMPILED], notes={"speed": time_notes(), "compile": met})})
    said = "torch.compile reached its limit of 8 graphs of one function at shape 9 of 12 (1 frame)"
    verdict = compared.judgement.verdicts[0]
    assert verdict.outcome == "no gain" and f"no gain: compile: {said}" in list_said(verdict)[0]
    assert is_blocking(verdict, compared.judgement.policy)
    report = render_report(compared)
    assert f"Fallback: `(all)`: {said}: it and new shapes after it run without compilation." in report
    assert costs_of(compared, "compiled")["graphs / graph breaks / recompilations / first call"] == (
        "8 / 0 / 7 / 1.0 s, limit reached"
    )


def test_the_time_says_of_which_shape_it_is(tmp_path: Path) -> None:
    shapes = {"num_shapes": 3, "timed": [4, 32, 40], "num_timed": 28, "num_pictures": 40}
    slow = {"speed": time_notes(high=0.99), "shapes": shapes}
    compared = judge_upscaler(tmp_path, {"last": Way([LAST], notes=slow)}, {"shapes": shapes})
    said = "4 pictures of 32 x 40, the most common of 3 shapes (28 of 40 pictures)"
    assert f"of one batch on this machine, {said}," in " ".join(render_report(compared).split())
    assert f"of the CPU time of torch float32, on {said}; a gain is" in list_said(compared.judgement.verdicts[0])[0]


def test_a_policy_is_told_layer_by_layer_with_the_reasons_of_its_rules(judged: ReleaseComparison) -> None:
    report = render_report(judged)
    assert "Steps: conv_policy (algorithm winograd_f43, dtype float16, 1 rules)." in report
    assert "| `branches.small.0` | winograd_f43 | float16 | – | – | F(4,3) leaves &#124; no room |" in report
    assert "2 of 3 layers wrote NaN or infinity, the first is <code>a&#124;b</code>." in report
    assert "In another memory format: `head`." in report
    assert "Steps: channels_last." in report and "Steps: compile (mode default)." in report


def test_fallbacks_of_one_kind_are_one_sentence() -> None:
    """A network has a hundred layers; a line each would hide the one that is odd."""
    reasons = ["1x1 kernel"] * 3 + ["stride 2"]
    fallbacks = [
        Fallback(layer=f"l{i}", reason=f"{why}: direct instead of winograd_f43") for i, why in enumerate(reasons)
    ]
    odd = Fallback(layer="up", reason="ConvTranspose2d is not covered: it runs as torch runs it")
    assert describe_fallbacks([*fallbacks, odd]) == [
        "Fallbacks: 4 layers: direct instead of winograd_f43 (3 1x1 kernel, 1 stride 2).",
        "Fallback: `up`: ConvTranspose2d is not covered: it runs as torch runs it.",
    ]


def test_images_that_lost_most_are_counted_in_the_objects_of_their_size(judged: ReleaseComparison) -> None:
    """One table a failing metric, no output of a detector in full."""
    report = render_report(judged)
    section = report[report.index("### Cases behind it") :]
    assert "Images that lost most of scenes/ap_small, objects found on average over the IoU thresholds:" in section
    assert "| image | objects | the reference finds | the candidate finds |" in section
    assert " | 1 | 1.0 | 0.0 |" in section
    assert "category_id" not in report and "perplexity" not in report and "KL" not in report


def test_a_failing_bucket_lists_its_own_cases(judged: ReleaseComparison) -> None:
    """Catches a table per bucket that is each time the same one."""
    comparisons = judged.judgement.verdicts[0].comparisons
    comparison = next(c for c in comparisons if c.metric == "scenes/ap" and c.bucket is None)
    pairs = judged.findings["policy"].pairs["scenes"]
    cases = worst_cases(comparison.model_copy(update={"bucket": "large"}), pairs, limit=3)
    assert [(case.reference, case.weight) for case in cases] == [(9.0, 9.0)] * 3
    assert worst_cases(comparison.model_copy(update={"bucket": "night"}), pairs, limit=3) == []


def test_pictures_that_became_unsound_are_named_and_not_printed(tmp_path: Path) -> None:
    ways = {"policy": Way([POLICY])}
    product = make_network_product("detector", ways)
    build = write_detector(tmp_path, product, ways)
    edit_records(
        build / "evaluations/policy", "scenes", lambda r: r.model_copy(update={"scores": r.scores | {"finite": 0.0}})
    )
    report = render_report(compare_release(product, build))
    assert "| loss | scene-0 | " in report and "|  | image | picture |" in report and "bbox" not in report


def edit_records(folder: Path, name: str, edit: Callable[[CaseRecord], CaseRecord]) -> None:
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(
            edit(CaseRecord.model_validate_json(line)).model_dump_json() + "\n"
            for line in path.read_text().splitlines()
        )
    )
    seal(folder, name)


def seal(folder: Path, name: str) -> None:
    evaluation = read_record(folder / "evaluation.json", Evaluation)
    file = evaluation.evals[name].model_copy(
        update={"sha256": digest_file(folder / f"{name}.jsonl"), "notes_sha256": digest_file(folder / f"{name}.json")}
    )
    write_record(folder / "evaluation.json", evaluation.model_copy(update={"evals": {name: file}}))


def test_a_tiled_candidate_says_how_many_pictures_are_cut(tmp_path: Path) -> None:
    compared = judge_upscaler(tmp_path, {"tiled": Way([TILED], notes={"work": 1.31})})
    (tmp_path / "pictures/3.png").unlink()
    report = render_report(compared)
    assert "views: 39 of 40 pictures are larger than a tile and are cut, into up to 4 tiles; 1 can't be read." in report
    assert costs_of(compared, "tiled")["work"] == "1.31" and "](seams.png)" in report
    assert "views: the worst single stitch of all steps by 0.0 levels" in report
    assert "Steps: tiling (tile 16, overlap 0, window none)." in report


def test_tiles_are_counted_with_the_overlap_that_they_were_run_with(tmp_path: Path) -> None:
    """Half of an odd tile, rounded up, is more than half a tile: no picture could be read."""
    report = render_report(judge_upscaler(tmp_path, {"tiled": Way([TILED | {"tile": 15, "overlap": 0.5}])}))
    assert "views: 40 of 40 pictures are larger than a tile and are cut, into up to 16 tiles." in report


@pytest.mark.parametrize("product", ["detector", "upscaler"])
def test_names_can_not_forge_a_line_of_the_report(tmp_path: Path, product: str) -> None:
    ways = {
        "bad": Way(
            [TILED] if product == "upscaler" else [POLICY],
            seam=9.0,
            by=LOSING,
            notes=OVERFLOW,
            fallbacks=[Fallback(layer=FORGED, reason=FORGED)],
        )
    }
    settings = make_network_product(product, ways)
    write = write_detector if product == "detector" else write_upscaler
    build = write(tmp_path, settings, ways)
    for name in ("plain", "bad"):
        edit_records(
            build / "evaluations" / name,
            next(iter(settings.evals)),
            lambda r: r.model_copy(update={"case_id": f"{r.case_id}{FORGED}", "prompt": FORGED}),
        )
    compared = compare_release(settings, build)
    report = render_report(compared)
    assert "### Cases behind it" in report and "&lt;/b>" in report
    assert not any(raw in report for raw in ("x</b>", "\n# `PASS`", "](http"))
    draw_all(compared, tmp_path)


def list_plots(compared: ReleaseComparison) -> dict[str, Callable[[ReleaseComparison, Path], None]]:
    """Return what stage compare draws of a product."""
    policy = compared.judgement.policy
    figures = KINDS[policy.kind].get_presenter().list_figures(make_network_product(policy.product, WAYS))
    return {figure.name: figure.draw for figure in figures}


def draw_all(compared: ReleaseComparison, folder: Path) -> dict[str, bytes]:
    plots = list_plots(compared)
    for name, plot in plots.items():
        plot(compared, folder / name)
    return {name: (folder / name).read_bytes() for name in plots}


def test_every_picture_stands_in_the_report_and_has_the_same_bytes_again(
    judged: ReleaseComparison, tmp_path: Path
) -> None:
    upscaler = judge_upscaler(tmp_path, {"tiled": Way([TILED], seam=4.0)})
    for compared in (judged, upscaler):
        report = render_report(compared)
        assert all(f"]({name})" in report for name in list_plots(compared))
        assert draw_all(compared, tmp_path) == draw_all(compared, tmp_path)


def list_words(plot: Callable[[Path], None], path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return what a plot's legends and titles say."""
    drawn: list[Figure] = []
    monkeypatch.setattr(network_plots, "save_figure", lambda figure, _path: drawn.append(figure))
    plot(path)
    return {text.get_text() for text in drawn[0].findobj(Text)} - {""}


def test_the_picture_of_layers_is_shown_only_where_a_layer_differs(tmp_path: Path) -> None:
    """DVC wants its file in any case; an empty one stood in the report, and in MLflow."""
    exact = {"layers": {"stem": NOTES["layers"]["stem"]}}
    for ways, is_shown in (
        ({"tiled": Way([TILED], notes=exact)}, False),
        ({"half": Way([HALF]), "tiled": Way([TILED], notes=exact)}, True),
    ):
        compared = judge_upscaler(tmp_path / str(is_shown), ways, exact)
        assert ("](layers.png)" in render_report(compared)) == is_shown
        assert draw_all(compared, tmp_path)["layers.png"]


def test_the_picture_of_layers_explains_only_marks_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = judge_upscaler(tmp_path, {"half": Way([HALF])})
    words = list_words(partial(network_plots.plot_layers, compared), tmp_path, monkeypatch)
    assert {"half", "torch's own", "stem"} <= words
    assert not words & {"winograd_f43", "winograd_f23", "direct", "NaN or infinity"}


def test_a_candidate_without_results_is_not_in_the_legend_of_sizes(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tmp_path / "build"
    shutil.copytree(small, build)
    (build / "evaluations/last/scenes.npz").unlink()
    compared = compare_release(make_network_product("detector", WAYS), build)
    words = list_words(partial(network_plots.plot_buckets, compared), tmp_path, monkeypatch)
    assert {"plain", "policy", "compiled"} <= words and "last" not in words


Damage = Callable[[Path], Any]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: p.unlink(), id="missing"),
        pytest.param(lambda p: p.write_bytes(b"GIF89a"), id="broken"),
    ],
)
def test_a_picture_that_can_not_be_read_leaves_its_place_empty(tmp_path: Path, damage: Damage) -> None:
    ways = {"bad": Way([POLICY], by=LOSING)}
    product = make_network_product("detector", ways)
    compared = compare_release(product, write_detector(tmp_path, product, ways, num_images=40))
    whole = draw_all(compared, tmp_path)
    for path in (tmp_path / "pictures").glob("*.png"):
        damage(path)
    gaps = draw_all(compared, tmp_path)
    assert {name for name in whole if whole[name] != gaps[name]} == {"worst.png"}

    upscaler = judge_upscaler(tmp_path / "up", {"tiled": Way([TILED], seam=4.0)})
    whole = draw_all(upscaler, tmp_path)
    for path in (tmp_path / "up/build/evaluations/tiled/views").glob("*.png"):
        damage(path)
    gaps = draw_all(upscaler, tmp_path)
    assert {name for name in whole if whole[name] != gaps[name]} == {"worst.png", "seams.png"}


@pytest.mark.parametrize("name", ["last", "plain"])
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": {"stem": 3}}'])
def test_notes_of_another_version_are_refused_in_one_line(small: Path, tmp_path: Path, name: str, text: str) -> None:
    """They were sealed so; a missing key must not end the stage, and no table or picture may need them."""
    build = tmp_path / "build"
    shutil.copytree(small, build)
    (build / "evaluations" / name / "scenes.json").write_text(text)
    seal(build / "evaluations" / name, "scenes")
    compared = compare_release(make_network_product("detector", WAYS), build)
    verdicts = {v.candidate: v for v in compared.judgement.verdicts}
    if name == "last":
        assert verdicts["last"].outcome == "refused"
        assert "scenes.json: not the notes of a network: " in list_said(verdicts["last"])[0]
    assert costs_of(compared, name)["finite outputs"] == "–"
    render_report(compared)
    draw_all(compared, tmp_path)


@pytest.mark.parametrize("file", ["scenes.npz", "scenes.jsonl", "scenes.json", "evaluation.json"])
@pytest.mark.parametrize("name", ["policy", "plain"])
def test_evidence_that_is_gone_is_refused_and_reported(small: Path, tmp_path: Path, file: str, name: str) -> None:
    build = tmp_path / "build"
    shutil.copytree(small, build)
    (build / "evaluations" / name / file).unlink()
    compared = compare_release(make_network_product("detector", WAYS), build)
    assert compared.judgement.verdicts[0].outcome == "refused" and "⛔ refused" in render_report(compared)
    draw_all(compared, tmp_path)


def found(
    boxes: list[list[float]],
    scores: list[float],
    categories: list[int] | None = None,
    *,
    hits: int = 9,
    crowds: int = 0,
    known: tuple[int, ...] = (1, 2),
) -> Any:
    """Return what is read of a record whose first boxes are objects, and the first of these crowds."""
    categories = categories or [1] * len(boxes)
    is_known = np.isin(categories, known)
    classes = np.searchsorted(known, categories)
    truth = Objects(
        np.array(boxes[:hits], dtype=float),
        classes[:hits],
        np.full(len(boxes[:hits]), 100.0),
        np.arange(len(boxes[:hits])) < crowds,
    )
    detections = Detections(np.array(boxes, dtype=float)[is_known], classes[is_known], np.array(scores)[is_known])
    output = json.dumps(
        [
            {"bbox": box, "score": score, "category_id": category}
            for box, score, category in zip(boxes, scores, categories, strict=True)
        ]
    )
    record = CaseRecord(case_id="c", input_digest="", cluster="", prompt="", output=output, fingerprint="")
    return read_found(record, match_image(truth, detections, num_classes=len(known)))


A, B, C = [0.0, 0.0, 10.0, 10.0], [50.0, 0.0, 10.0, 10.0], [90.0, 0.0, 10.0, 10.0]


def test_an_object_is_lost_that_only_the_reference_finds() -> None:
    ours = found([A, B, C], [0.9, 0.8, 0.7], hits=2)
    assert find_lost(ours, ours).boxes.tolist() == []
    assert find_lost(ours, found([A], [0.9])).boxes.tolist() == [B], "C was a false alarm: nothing is lost with it"
    assert find_lost(ours, found([A, B], [0.9, 0.2])).boxes.tolist() == [B], "too unsure to be shown"
    assert find_lost(ours, found([A, B], [0.9, 0.9], [1, 2])).boxes.tolist() == [B], "another category"
    assert find_lost(ours, found([A, [51.0, 1, 10, 10]], [0.9, 0.9])).boxes.tolist() == []


def test_the_order_of_the_adapter_does_not_change_which_boxes_are_objects() -> None:
    """Boxes lie in the record as the adapter wrote them, flags in the table by score."""
    read = found([A, B, C], [0.4, 0.9, 0.6], hits=2)
    assert read.is_hit.tolist() == [True, True, False]


def test_of_equal_scores_each_box_is_what_it_was_matched_as() -> None:
    """Told apart by score alone, a false alarm was a hit, '2 of 1' found, and what it covered was not lost."""
    read = found([A, B], [1.0, 1.0], hits=1)
    assert read.boxes.tolist() == [A, B] and read.is_hit.tolist() == [True, False]
    read = found([A, B, C], [1.0, 1.0, 1.0], [2, 1, 1], hits=1)
    assert read.categories.tolist() == [2, 1, 1] and read.is_hit.tolist() == [True, False, False]


def test_boxes_that_do_not_count_are_not_drawn() -> None:
    """A person in a crowd, a category that no annotation has and the 101st of a class were drawn as false alarms."""
    assert found([A, B, C], [0.9, 0.8, 0.7], hits=2, crowds=1).boxes.tolist() == [B, C]
    read = found([A, B, C], [0.9, 0.8, 0.9], [2, 1, 2], hits=1, known=(2,))
    assert read.boxes.tolist() == [A, C] and read.is_hit.tolist() == [True, False]
    read = found([A, *[B] * 100, C], [0.5, *[0.9] * 100, 0.9], hits=1)
    assert read.boxes.tolist() == [B] * 100 and not read.is_hit.any()


@pytest.mark.parametrize("scores", [[], [0.9], [0.9, 0.9], [0.9, 0.8, 0.7]])
def test_an_output_that_was_not_matched_is_told(scores: list[float]) -> None:
    """By position any box would take the flags of another."""
    people = make_people(np.random.default_rng(0), num_large=2, num_small=0)
    table = match_image(people, Detections(people.boxes, people.classes, np.array([0.9, 0.7])), num_classes=1)
    output = json.dumps([{"bbox": A, "score": score, "category_id": 1} for score in scores])
    record = CaseRecord(case_id="c", input_digest="", cluster="", prompt="", output=output, fingerprint="")
    with pytest.raises(EvidenceError, match="'c': expected the results of its output .* 2 scores of class 0; run"):
        read_found(record, table)


@pytest.mark.parametrize("output", ["", "{}", "[1]", '[{"bbox": [1], "score": 1, "category_id": 1}]', "[{}]"])
def test_an_output_that_holds_no_boxes_is_told(output: str) -> None:
    people = make_people(np.random.default_rng(0), num_large=1, num_small=0)
    table = match_image(people, Detections(people.boxes, people.classes, np.array([0.9])), num_classes=1)
    record = CaseRecord(case_id="c", input_digest="", cluster="", prompt="", output=output, fingerprint="")
    with pytest.raises(EvidenceError, match="expected COCO results"):
        read_found(record, table)


@pytest.mark.parametrize("side", [1e8, 1e20, 1e308])
def test_huge_boxes_are_drawn_no_farther_than_the_picture(monkeypatch: pytest.MonkeyPatch, side: float) -> None:
    """Pillow draws an outline pixel by pixel, those outside of the picture, too: a broken detector hung the report."""
    picture, drawn = np.zeros((40, 60, 3), dtype=np.uint8), []
    draw = ImageDraw.ImageDraw.rectangle

    def spy(pen: ImageDraw.ImageDraw, corners: tuple[float, ...], **named: Any) -> None:
        drawn.append(np.abs(corners).max())
        if drawn[-1] < 1e4:
            draw(pen, corners, **named)

    monkeypatch.setattr(ImageDraw.ImageDraw, "rectangle", spy)
    huge = np.array([[-side, 10, side, 20], [-side, -side, 1.5 * side, side + 10], [30, 10, side, side]])
    none = Found(np.zeros((0, 4)), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    found = Found(huge, np.ones(3, dtype=np.int64), np.array([True, True, False]))
    shown = draw_boxes(picture, found, found)
    assert max(drawn) < 1000, "pixels of a picture that is enlarged to 640"
    same = np.array([[-100.0, 10, 100, 20], [-100, -100, 200, 100], [30, 10, 100, 100]])
    same[1, 3] = 110 if side == 1e8 else 100  # 10 pixels are nothing beside 1e20
    near = Found(same, found.categories, found.is_hit)
    assert shown.any() and np.array_equal(shown, draw_boxes(picture, near, near))
    assert not draw_boxes(picture, none, none).any()


def test_boxes_that_end_outside_of_a_picture_are_drawn_as_pillow_draws_them() -> None:
    """Clipped to the picture or to one width of a line, a box just outside of it left pixels on its edge."""
    rng, picture = np.random.default_rng(0), np.zeros((64, 64, 3), dtype=np.uint8)
    for box in np.concatenate([rng.uniform(-9, 70, (200, 2)), rng.uniform(0, 9, (200, 2))], axis=1):
        plain = Image.new("RGB", (640, 640))
        left, top, across, down = 10 * box
        ImageDraw.Draw(plain).rectangle((left, top, left + across, top + down), outline=FOUND, width=2)
        found = Found(box[None], np.ones(1, dtype=np.int64), np.ones(1, dtype=bool))
        assert np.array_equal(draw_boxes(picture, found, found.select(np.zeros(1, dtype=bool))), np.asarray(plain))


def test_pictures_are_ordered_by_what_is_lost(judged: ReleaseComparison) -> None:
    losses = list_losses(judged.findings["policy"].pairs["scenes"])
    assert losses and losses[0][0] >= losses[-1][0] == 1 and all(i % 2 for _, i in losses), "only these hold small ones"
    assert list_losses(judged.findings["last"].pairs["scenes"]) == []


def test_the_worst_picture_of_an_upscaler_follows_its_own_scores(tmp_path: Path) -> None:
    """Catches scores of image pipelines being looked for: all would be equal, and the first the worst."""
    compared = judge_upscaler(tmp_path, {"tiled": Way([TILED], seam=4.0)})
    assert "views: the worst single stitch of all steps by 8.0 levels, of `view-7`." in render_report(compared)
    assert list_worst_images(compared.findings["tiled"].pairs, compared.evals)[0] == ("views", 7)


@pytest.mark.parametrize("is_turned", [False, True], ids=["columns", "rows"])
def test_the_strip_is_cut_at_the_worst_stitch(is_turned: bool) -> None:
    ours = np.random.default_rng(0).integers(60, 190, (64, 128, 3), dtype=np.uint8)
    theirs = ours.astype(int)
    theirs[:, 64:96] += 20  # tiles of 16 input pixels: stitches at 32, 64 and 96, and at row 32
    theirs[:32, 96:] += 50
    if is_turned:
        ours, theirs = ours.transpose(1, 0, 2), theirs.transpose(1, 0, 2)
    given = (ours.shape[0] // 2, ours.shape[1] // 2)
    strip = cut_strip(ours, theirs.astype(np.uint8), given, Tiling(tile=16, overlap=0, window="none"))
    assert strip is not None and strip.stitch == 24
    gap = strip.steps[1] - strip.steps[0]
    assert int(np.abs(gap).argmax()) == strip.stitch - 1 and abs(gap).max() == pytest.approx(50)
    assert strip.reference.shape == strip.candidate.shape == (48, 48, 3)


def test_a_picture_that_is_not_cut_has_no_stitch_and_other_sizes_are_told() -> None:
    picture = np.zeros((32, 32, 3), dtype=np.uint8)
    assert cut_strip(picture, picture, (16, 16), Tiling(tile=16, overlap=0, window="none")) is None
    assert cut_strip(picture, picture, (16, 16), None) is None
    for given in ((16, 15), (64, 64)):
        with pytest.raises(EvidenceError, match="expected two pictures of a whole multiple"):
            cut_strip(picture, picture, given, None)


def test_a_large_picture_is_cut_to_where_it_differs_most() -> None:
    ours = np.zeros((LARGEST_SHOWN + 100, 600, 3), dtype=np.uint8)
    theirs = ours.copy()
    theirs[300:310, 500:520] = 255
    cut, other = crop_most_different(ours, theirs)
    assert cut.shape == (160, 160, 3) and other.sum() == theirs.sum() and not cut.any()
    small = np.zeros((30, 40, 3), dtype=np.uint8)
    assert crop_most_different(small, small)[0].shape == small.shape
