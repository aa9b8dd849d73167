"""The early stop: it keeps its level however often it looks, finds harm early, and depends on no order of arrival."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.errors import EvidenceError, HarmFound
from pipeline.evalsets.cases import DocumentCase
from pipeline.gate.harm_stop import HarmWatch
from pipeline.products import list_known_metrics
from pipeline.products.text.evals.runner import run_cases
from pipeline.records.evaluations import CaseRecord
from pipeline.running.journal import Journal
from scripts import screen
from tests.fakes.synthetic_records import Behaviour, make_cases, make_params, write_tree
from tests.products.text.test_runner import make_context

METRIC = ("w/task_completion_rate", list_known_metrics()["task_completion_rate"], 0.03)


def watch(reference: list[CaseRecord], *, seed: int = 0) -> HarmWatch:
    return HarmWatch(reference, [METRIC], alpha=0.05, num_metrics=1, seed=seed)


def ask(reference: list[CaseRecord], candidate: list[CaseRecord], *, seed: int = 0) -> int | None:
    """Return after how many cases it stopped, None where it did not."""
    watching = watch(reference, seed=seed)
    try:
        for record in sorted(candidate, key=lambda r: watching.rank(r.cluster)):
            watching.add(record)
    except HarmFound:
        return watching.num_seen
    return None


def draw(rng: Any, drop: float, *, n: int = 600, size: int = 3) -> tuple[list[CaseRecord], list[CaseRecord]]:
    """Draw pairs of which 8 % flip, and as many more are lost as the drop asks for; clusters flip as one."""
    flips = np.repeat(rng.choice([-1, 0, 1], n // size, p=[0.04, 0.92 - drop, 0.04 + drop]), size)
    reference = np.where(flips == 0, 1, flips > 0).astype(int)
    return make_cases(list(reference), cluster_size=size), make_cases(list(reference - flips), cluster_size=size)


@pytest.mark.parametrize(("drop", "least", "most"), [(0.03, 0, 0.05), (0.2, 0.95, 1)])
def test_it_stops_for_harm_and_seldom_at_the_tolerance(drop: float, least: float, most: float) -> None:
    rng = np.random.default_rng(5)
    stops = [ask(*draw(rng, drop), seed=i) for i in range(60)]
    share = sum(stop is not None for stop in stops) / len(stops)
    assert least <= share <= most + 2 * (most * (1 - most) / len(stops)) ** 0.5
    if drop > 0.1:
        assert np.median([stop for stop in stops if stop]) < 300


def test_the_order_of_arrival_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    reference, candidate = draw(rng, 0.2)
    stops = set()
    for _ in range(5):
        watching = watch(reference)
        with pytest.raises(HarmFound) as found:
            for i in rng.permutation(len(candidate)):
                watching.add(candidate[int(i)])
        stops.add((watching.num_seen, str(found.value)))
    assert len(stops) == 1


def test_nothing_is_ever_proven_by_equal_answers() -> None:
    reference = make_cases([1] * 200)
    assert ask(reference, reference) is None


def test_a_running_eval_ends_and_keeps_what_it_has(tmp_path: Path) -> None:
    cases = [DocumentCase(id=f"c{i}", cluster=f"k{i}", text=f"text {i}") for i in range(300)]

    def judged(case: DocumentCase, score: float) -> CaseRecord:
        return CaseRecord(
            case_id=case.id,
            input_digest=case.digest,
            cluster=case.cluster,
            prompt="",
            output="",
            scores={"completed": score},
            fingerprint="f",
        )

    asked = []

    async def judge(case: DocumentCase) -> CaseRecord:
        asked.append(case.id)
        await asyncio.sleep(0)
        return judged(case, 0.0)

    def run() -> None:
        watching = watch([judged(case, 1.0) for case in cases])
        with Journal(tmp_path / "e.jsonl", fingerprint="f", key="s") as journal:
            asyncio.run(run_cases(make_context(journal, watch=watching), cases, judge))

    with pytest.raises(HarmFound, match=r"w/task_completion_rate: a loss of more than 3 points is proven after"):
        run()
    assert 5 < len(asked) < 40
    assert asked != [case.id for case in cases[: len(asked)]]
    num_asked = len(asked)
    with pytest.raises(HarmFound):
        run()
    assert len(asked) == num_asked, "what the journal holds proves it again"


def test_a_case_that_the_reference_was_not_asked_is_named() -> None:
    reference = make_cases([1] * 3)
    watching = watch(reference)
    with pytest.raises(EvidenceError, match=f"case {reference[1].case_id!r} asks something else"):
        for record in reference:
            is_edited = record is reference[1]
            watching.add(record.model_copy(update={"input_digest": "edited"}) if is_edited else record)


def test_an_evalset_that_was_edited_since_the_reference_ran_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path / "build/agent", {"a": Behaviour()})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "load_evalset", lambda folder: SimpleNamespace(digest="another"))
    with pytest.raises(EvidenceError, match=r"as the reference was asked it .* found another one \(another\)"):
        screen.make_watches(make_params(["a"], ["a"]))
