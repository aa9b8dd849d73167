"""Timed rounds in the gate: outcomes by cell, what refuses and what fails, and where a person sees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import stages.gate
from pipeline.errors import EvidenceError
from pipeline.gate.checks import check_outcomes, check_policy
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.verdicts import VERDICT_FILE, build_policy
from pipeline.products.params import Params
from pipeline.products.text.benchmark.prefix_cache import NUM_PROBES
from pipeline.products.text.findings.speed import describe_speed, judge_speed
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.show.plots import plot_speed
from pipeline.products.text.show.speed import describe_measurement
from pipeline.records.benchmarks import Batch, Benchmark, Cell, Machine, Probe, Side, read_machine
from pipeline.records.evaluations import CaseRecord
from pipeline.records.record_files import write_record
from pipeline.records.speculation import SpeculationCounts
from pipeline.records.verdicts import Verdict
from pipeline.report.terminal import render_gate
from pipeline.settings.base import REPORTS
from tests.fakes.judging import build_runs, compare_release, list_said, render_report
from tests.fakes.synthetic_records import PRODUCT, Behaviour, make_candidate, make_params, write_tree

HERE = Machine(cpu="Nice CPU", num_cores=2, gpus=())
STEADY, FASTER, SLOWER = [0.97, 1.02, 1.0, 1.01, 0.99, 1.03], [1.1, 1.2, 1.3, 1.15, 1.25, 1.12], [0.8, 0.86] * 3


def params_of(**benchmark: Any) -> TextProduct:
    return make_params(["a"], ["a"], benchmark={"candidates": ["a"]} | benchmark)


def make_cell(concurrency: int, band: tuple[int, int], ratios: Sequence[float]) -> Cell:
    """A machine that gets slower from round to round, and a candidate that keeps its distance."""
    ours = [100.0 * concurrency * 0.7**number for number in range(len(ratios))]
    reference, candidate = (
        [Batch(throughput_tokens_per_s=t, ttft_ms=1000 / t, inter_token_latency_ms=100 / t) for t in side]
        for side in (ours, [r * t for r, t in zip(ratios, ours, strict=True)])
    )
    return Cell(
        concurrency=concurrency,
        prompt_tokens=band,
        num_requests=4,
        reference=tuple(reference),
        candidate=tuple(candidate),
    )


def make_probes(*ratios: float, num_probes: int = NUM_PROBES) -> tuple[Probe, ...]:
    """In both bands, ratios in turn."""
    return tuple(
        Probe(prompt_tokens=band, known_ttft_ms=50 * ratios[i % len(ratios)], fresh_ttft_ms=50)
        for band in ((10, 20), (30, 60))
        for i in range(num_probes)
    )


def make_benchmark(*ratios: Sequence[float], **changes: Any) -> Benchmark:
    """One list of ratios for each cell of the grid, in its order."""
    places = [(c, (low, high)) for low, high in ((10, 20), (30, 60)) for c in (1, 4)]
    reference, candidate = (
        Side(
            fingerprint=make_candidate(name).fingerprint,
            peak_memory_mib=peak,
            num_requests=96,
            num_changed=0,
            probes=make_probes(0.9, 1.1),
            repeat_ttft_ratio=0.3,
        )
        for name, peak in (("reference", 512.0), ("a", 1280.0))
    )
    benchmark = Benchmark(
        name="a",
        work=params_of().benchmark.build_work(),
        machine=HERE,
        definitions="TTFT is so and so.",
        reference=reference,
        candidate=candidate,
        cells=tuple(make_cell(*place, found) for place, found in zip(places, ratios, strict=True)),
    )
    return benchmark.model_copy(update=changes)


MIXED = make_benchmark(FASTER, STEADY, SLOWER, FASTER)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speed") / "build"
    write_tree(folder, {"a": Behaviour()}, num_cases=400)
    return folder


def judge(build: Path, benchmark: Benchmark | None = MIXED, **settings: Any) -> tuple[ReleaseComparison, Verdict]:
    path = build / "benchmarks/a.json"
    path.unlink(missing_ok=True)
    if benchmark is not None:
        write_record(path, benchmark)
    compared = compare_release(params_of(**settings), build)
    check_outcomes(compared.judgement)
    return compared, compared.judgement.verdicts[0]


def test_a_cell_is_faster_or_slower_when_its_whole_interval_is() -> None:
    speed = judge_speed(MIXED)
    assert [cell.outcome for cell in speed.cells] == ["faster", "no difference shown", "slower", "faster"]
    assert describe_speed(speed) == (
        "faster in 2 of 4 cells (1 in flight, 10 to 20 prompt tokens; 4 in flight, 30 to 60 prompt tokens), "
        "slower in 1 of 4 cells (1 in flight, 30 to 60 prompt tokens)"
    )
    assert speed.confidence == 0.96875
    assert (speed.reference_peak_memory_mib, speed.candidate_peak_memory_mib) == (512, 1280)


def test_ratios_are_paired_within_a_round() -> None:
    """The machine loses a third of its speed each round: unpaired, that would drown a tenth."""
    cell = judge_speed(MIXED).cells[0]
    assert cell.throughput_tokens_per_s.candidate.low < cell.throughput_tokens_per_s.reference.median
    assert cell.throughput_tokens_per_s.ratio.low == pytest.approx(1.1)
    assert cell.ttft_ms.ratio.median == pytest.approx(1 / 1.175, abs=1e-3)


def cut(**change: Any) -> Benchmark:
    return MIXED.model_copy(update=change)


@pytest.mark.parametrize(
    ("benchmark", "said"),
    [
        (cut(cells=()), "expected the cells"),
        (cut(cells=MIXED.cells[1:]), "expected the cells"),
        (cut(cells=(*MIXED.cells, MIXED.cells[0])), "expected the cells"),
        (
            cut(
                cells=(MIXED.cells[0].model_copy(update={"reference": MIXED.cells[0].reference[:5]}), *MIXED.cells[1:])
            ),
            "expected 6 rounds of both sides, got 5 and 6",
        ),
    ],
    ids=["empty", "a-cell-gone", "a-cell-twice", "a-round-gone"],
)
def test_a_grid_with_a_gap_is_refused(build: Path, benchmark: Benchmark, said: str) -> None:
    """A cell that is too slow must not be left out."""
    _, verdict = judge(build, benchmark, max_slowdown=0.1)
    assert verdict.outcome == "refused" and any(said in reason for reason in list_said(verdict))


def test_speed_is_a_note_as_long_as_nothing_limits_it(build: Path) -> None:
    _, verdict = judge(build)
    assert verdict.outcome == "pass"
    assert [r for r in list_said(verdict) if "speed" in r] == [f"note: speed: {describe_speed(judge_speed(MIXED))}"]


@pytest.mark.parametrize(("limit", "outcome"), [(0.1, "fail"), (0.15, "pass"), (0.3, "pass")])
def test_a_cell_surely_slower_than_tolerated_fails(build: Path, limit: float, outcome: str) -> None:
    """0.80 to 0.86 is surely below 0.9, and not surely below 0.85."""
    compared, verdict = judge(build, max_slowdown=limit)
    assert verdict.outcome == outcome
    said = (
        "1 in flight, 30 to 60 prompt tokens: throughput is 0.83 (0.80 to 0.86) of the reference's (96.9% "
        "interval), expected 0.9 or more (benchmark.max_slowdown)"
    )
    assert (f"fail: speed: {said}" in list_said(verdict)) == (outcome == "fail")
    assert (f"  fail         speed: {said}" in render_gate(compared.judgement).splitlines()) == (outcome == "fail")


@pytest.mark.parametrize(
    ("benchmark", "said"),
    [
        (None, "a.json: expected a Benchmark, found no file; run `dvc repro`"),
        (
            MIXED.model_copy(update={"refusal": "candidate, 1 in flight: expected 8 completion tokens, got 7"}),
            "benchmark of a: candidate, 1 in flight: expected 8 completion tokens, got 7",
        ),
        (MIXED.model_copy(update={"work": MIXED.work.model_copy(update={"num_tokens": 9})}), "timed on the work that "),
        (
            MIXED.model_copy(update={"name": "b"}),
            "expected 'a' timed on the work that params.yaml asks for, got 'b' on ",
        ),
        (MIXED.model_copy(update={"reference": MIXED.candidate}), "expected the reference that was evaluated"),
        (MIXED.model_copy(update={"candidate": MIXED.reference}), "expected the candidate that was evaluated"),
    ],
    ids=["missing", "unequal-work", "other-work", "other-name", "other-reference", "other-candidate"],
)
def test_a_benchmark_that_is_not_fit_refuses(build: Path, benchmark: Benchmark | None, said: str) -> None:
    _, verdict = judge(build, benchmark)
    assert (verdict.outcome, verdict.speed) == ("refused", None)
    assert said in list_said(verdict)[0] and list_said(verdict)[0].startswith("refused: ")


def with_side(role: str, **change: Any) -> Benchmark:
    return MIXED.model_copy(update={role: getattr(MIXED, role).model_copy(update=change)})


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_a_server_that_knew_the_prompts_refuses_whatever_the_record_says_of_it(build: Path, role: str) -> None:
    """Judged from the probes: the stage may have been another version, or the file edited."""
    _, verdict = judge(build, with_side(role, probes=make_probes(0.05, 0.06)))
    assert (verdict.outcome, verdict.speed) == ("refused", None)
    assert (
        f"{role}, 10 to 20 prompt tokens: the server knew the timed prompts, which take 0.06 (0.05 to 0.06) of the "
        "TTFT of prompts that nobody had asked, expected 0.9 or more; "
    ) in list_said(verdict)[0]
    assert list_said(verdict)[0].endswith("then run `dvc repro -f -s benchmark@a`")


@pytest.mark.parametrize(
    ("probes", "outcome"),
    [
        (make_probes(0.5, 1.01), "pass"),
        (make_probes(0.82, 0.9), "pass"),
        (make_probes(0.6, 0.89), "refused"),
        (make_probes(0.05, *[1.0] * 5), "pass"),
        ((), "refused"),
        (make_probes(1.0, num_probes=19), "refused"),
        (make_probes(1.0)[:NUM_PROBES], "refused"),
    ],
    ids=["not-surely", "hardly", "surely", "a-few", "none", "too-few", "a-band-without"],
)
def test_only_what_was_surely_known_is_refused_and_so_is_what_was_not_probed(
    build: Path, probes: tuple[Probe, ...], outcome: str
) -> None:
    assert judge(build, with_side("candidate", probes=probes))[1].outcome == outcome


@pytest.mark.parametrize("number", ["0.0", "1e999", "-1.0"])
@pytest.mark.parametrize("name", ["inter_token_latency_ms", "ttft_ms", "throughput_tokens_per_s"])
def test_a_time_that_is_none_refuses_the_candidate_and_no_more(build: Path, name: str, number: str) -> None:
    """It once ended compare, and with it the verdict on every candidate."""
    judge(build)
    path, text = build / "benchmarks/a.json", MIXED.model_dump_json()
    edited = re.sub(f'"{name}":[0-9.]+', f'"{name}":{number}', text, count=1)
    assert edited != text
    path.write_text(edited, encoding="utf-8")
    (verdict,) = compare_release(params_of(), build).judgement.verdicts
    assert (
        verdict.outcome == "refused"
        and f"a.json: not a valid Benchmark: cells.0.reference.0.{name}" in (list_said(verdict)[0])
    )


def count(num_accepted: int) -> SpeculationCounts:
    return SpeculationCounts(
        method="draft_model",
        num_tokens=1,
        num_target_forwards=100,
        num_completion_tokens=130,
        num_drafted=100,
        accepted_by_position=(num_accepted,),
    )


@pytest.mark.parametrize(("accepted", "warned"), [(54, True), (95, False)])
def test_drafts_of_the_timed_work_are_shown_beside_those_of_the_evals(accepted: int, warned: bool) -> None:
    """Answers go on past their end in the timed work: drafts there say little of the served one."""
    benchmark = with_side("candidate", speculation=count(accepted))
    cases = [
        CaseRecord(
            case_id=str(n),
            input_digest="d",
            cluster="c",
            prompt="p",
            output="one\ntwo",
            fingerprint="f",
            num_completion_tokens=26,
            speculation=count(99),
        )
        for n in range(3)
    ]
    said = describe_measurement(benchmark, judge_speed(benchmark), None, cases)[-1]
    assert said.startswith(f"Drafted tokens accepted: {accepted}.0% in the timed work, 99.0% in the evals.")
    assert (
        "**The timed work is not the served one**: it decodes 8 tokens a request, the evaluated answers have 13 "
        "(median)" in said
    ) == warned
    assert ("set benchmark.num_tokens nearer to 13." in said) == warned


def without_speed(verdict: Verdict) -> Verdict:
    return verdict.model_copy(update={"outcome": "pass", "reasons": (), "speed": None})


def without_the_reason(verdict: Verdict) -> Verdict:
    return verdict.model_copy(update={"outcome": "pass", "reasons": ()})


@pytest.mark.parametrize("edit", [without_speed, without_the_reason])
def test_the_gate_sees_a_slow_verdict_that_was_edited_into_a_pass(
    build: Path, edit: Callable[[Verdict], Verdict]
) -> None:
    compared, verdict = judge(build, max_slowdown=0.1)
    edited = compared.judgement.model_copy(update={"verdicts": (edit(verdict),)})
    with pytest.raises(EvidenceError, match="a: the verdict contradicts the numbers or the policy beside it"):
        check_outcomes(edited)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_slowdown": 0.2}, "judged with max_slowdown None, params.yaml says 0.2"),
        ({"candidates": []}, r"judged with benchmarked \['a'\], params.yaml says \[\]"),
    ],
)
def test_a_judgement_under_another_limit_is_refused(build: Path, asked: dict[str, Any], said: str) -> None:
    judgement = judge(build)[0].judgement
    assert judgement.policy == build_policy(params_of())
    with pytest.raises(EvidenceError, match=said):
        check_policy(judgement, params_of(**asked))


def test_the_gate_stops_a_slow_release(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages.gate, "load_params", lambda: Params({PRODUCT: params_of(max_slowdown=0.1)}))
    write_record(REPORTS / PRODUCT / VERDICT_FILE, judge(build, max_slowdown=0.1)[0].judgement)
    assert stages.gate.main([PRODUCT]) == 1 and not Path("build", PRODUCT, stages.gate.MARKER).exists()


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (HERE, "Measured on Nice CPU, 2 cores: the machine that wrote this report."),
        (HERE.model_copy(update={"num_cores": 64}), "**another machine** than the one that wrote this report."),
        (None, "which may not be the machine that wrote this report."),
    ],
    ids=["here", "elsewhere", "unknown"],
)
def test_the_report_shows_the_grid_and_says_where_it_was_measured(
    build: Path, machine: Machine | None, said: str
) -> None:
    report = render_report(judge(build)[0], machine)
    assert "| 1 | 30 to 60 | 42 → 34 | 0.83 (0.80 to 0.86) |" in report
    assert said in report and "TTFT is so and so." in report and "speed.png" in report
    assert "loading included: 512 MiB → 1,280 MiB." in report
    assert "192 timed requests with 8 completion tokens and a prompt within its band each; 0 answers differ" in report
    assert "TTFT is 1.00 (0.90 to 1.10) (reference) and 1.00 (0.90 to 1.10) (candidate) at 10 to 20 prompt" in report
    assert "sent once more, prompts have 0.30 (reference) and 0.30 (candidate) of their first TTFT" in report


def test_gpu_memory_is_shown_where_there_is_a_gpu(build: Path) -> None:
    assert MIXED.reference is not None and MIXED.candidate is not None
    machine = HERE.model_copy(update={"gpus": ("G",)})
    held = MIXED.candidate.model_copy(update={"gpu_memory_mib": 70016.0})
    compared, _ = judge(build, MIXED.model_copy(update={"machine": machine, "candidate": held}))
    assert "GPU memory that it held after the rounds: unknown → 70,016 MiB." in render_report(compared, machine)
    _, run = build_runs(compared.judgement, build)
    assert run.metrics["speed/gpu_memory_mib"] == 70016


def test_a_machine_is_known_from_what_the_stage_env_wrote(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    assert read_machine(path) is None
    path.write_text('{"cpu": "Nice CPU", "num_cores": 2, "gpus": [{"name": "G", "driver": "1"}], "memory_mib": 3}')
    assert read_machine(path) == Machine(cpu="Nice CPU", num_cores=2, gpus=("G",))


def test_runs_hold_the_medians_under_names_that_say_the_cell(build: Path) -> None:
    reference, run = build_runs(judge(build)[0].judgement, build)
    assert run.metrics["speed/1 in flight 30-60 prompt tokens throughput_percent_of_reference"] == pytest.approx(83)
    assert run.metrics["speed/peak_memory_mib"] == 1280
    assert len([name for name in run.metrics if name.startswith("speed/")]) == 3 * 4 + 1
    assert not [name for name in reference.metrics if name.startswith("speed/")]


def test_speeds_are_drawn_and_so_is_that_there_are_none(build: Path, tmp_path: Path) -> None:
    drawn = {}
    for name, compared in (("some", judge(build)[0]), ("none", judge(build, candidates=[])[0])):
        plot_speed(compared, tmp_path / f"{name}.png")
        drawn[name] = (tmp_path / f"{name}.png").read_bytes()
    assert drawn["some"] != drawn["none"]


def test_a_verdict_without_speed_is_no_pass_where_slowness_is_limited(build: Path) -> None:
    judgement = judge(build, max_slowdown=0.9)[0].judgement
    (verdict,) = judgement.verdicts
    hidden = judgement.model_copy(
        update={
            "policy": judgement.policy.model_copy(update={"benchmarked": ()}),
            "verdicts": (verdict.model_copy(update={"outcome": "pass", "reasons": (), "speed": None}),),
        }
    )
    with pytest.raises(EvidenceError, match="a: the verdict contradicts the numbers or the policy beside it"):
        check_outcomes(hidden)
