"""Records as a table: read whole, let go when memory is needed, checked again when they come back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import EvidenceError
from pipeline.gate import case_table
from pipeline.gate.case_rows import parse_rows
from pipeline.gate.case_table import CaseTable
from pipeline.records.evaluations import CaseRecord, read_cases
from pipeline.records.record_files import write_cases
from pipeline.records.speculation import SpeculationCounts
from tests.fakes.judging import compare_release, render_report
from tests.fakes.synthetic_records import Behaviour, make_cases, make_params, write_tree

LINE = make_cases([1])[0].model_dump_json()
COUNTS = SpeculationCounts(
    method="m", num_tokens=2, num_target_forwards=3, num_completion_tokens=5, num_drafted=6, accepted_by_position=(2, 1)
)


def test_what_was_let_go_is_loaded_again_and_what_is_pinned_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_table, "_MAX_RECORDS", 25)
    loads = {"pinned": 0, "first": 0, "second": 0, "third": 0}

    def load(name: str) -> list[CaseRecord]:
        loads[name] += 1
        return make_cases([1.0] * 10)

    tables = {name: CaseTable(partial(load, name), is_pinned=name == "pinned") for name in loads}
    for name in ("third", "second", "pinned"):
        assert tables[name].scores("completed", where="w").sum() == 10 and len(tables[name]) == 10
    assert loads == {"pinned": 1, "first": 1, "second": 1, "third": 1}
    assert tables["first"][3].case_id == "case-3" and loads["first"] == 2  # "third", looked at longest ago, went for it
    assert [r.case_id for r in tables["second"]] == [r.case_id for r in tables["first"]] and loads["second"] == 1
    assert tables["third"].digests and loads["third"] == 2


def test_one_record_of_what_was_let_go_is_read_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """To show five cases of a failure, all two thousand of each eval were parsed again."""
    monkeypatch.setattr(case_table, "_MAX_RECORDS", 1)
    records, loads = make_cases([1, 0, 1, 0]), []

    def load() -> list[CaseRecord]:
        loads.append(1)
        return records

    table = CaseTable(load, pick=records.__getitem__)
    turned = table.at(np.array([3, 2, 1, 0]))
    scores = turned.scores("completed", where="w").tolist()
    CaseTable(lambda: make_cases([1]))
    before = len(loads)
    assert turned[0] is records[3] and table[0] is records[0] and scores == [0, 1, 0, 1]
    assert turned.scores("completed", where="w").tolist() == scores and len(loads) == before


def test_a_table_in_another_order_has_its_columns_in_that_order() -> None:
    table = CaseTable.of(make_cases([1, 0, 1, 0], cluster_size=2, buckets=["all"]))
    order = np.array([3, 0, 2, 1])
    turned = table.at(order)
    assert turned.scores("completed", where="w").tolist() == [0, 1, 1, 0]
    assert turned.clusters.tolist() == [0, 1, 0, 1] and turned.locate("all").tolist() == [0, 1, 2, 3]
    assert table.at(np.arange(4)) is table and turned.locate("none").tolist() == []
    with pytest.raises(EvidenceError, match="w: case 'case-0' has no score 'exact', it has \\['completed'\\]"):
        table.scores("exact", where="w")


def test_records_that_were_changed_after_they_were_judged_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report on a failure reads cases again that had to make room: those that were judged, or none."""
    monkeypatch.setattr(case_table, "_MAX_RECORDS", 1)
    build = tmp_path / "build"
    write_tree(build, {"bad": Behaviour({"workflows": 0.3}), "good": Behaviour()}, num_cases=200)
    compared = compare_release(make_params(["bad", "good"], ["good"]), build)
    path = build / "evaluations/bad/workflows.jsonl"
    write_cases(path, reversed(read_cases(path)))
    with pytest.raises(EvidenceError, match=r"bad/workflows\.jsonl: expected sha256 .* were edited or cut"):
        render_report(compared)


def test_a_report_is_the_same_whatever_had_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, params = tmp_path / "build", make_params(["bad", "good"], ["good"])
    write_tree(build, {"bad": Behaviour({"workflows": 0.3}, nll_shift=0.05), "good": Behaviour()}, num_cases=200)
    roomy = render_report(compare_release(params, build))
    monkeypatch.setattr(case_table, "_MAX_RECORDS", 1)
    assert render_report(compare_release(params, build)) == roomy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(f"{LINE},{LINE}\n", ":1: not a case record", id="two-on-a-line"),
        pytest.param(f"{LINE}\n\n{LINE}\n", ":2: not a case record", id="empty-line"),
        pytest.param(LINE.replace(',"prompt"', ',\n"prompt"') + "\n", ":1: not a case record", id="one-on-two-lines"),
        pytest.param(f"{LINE}\n{LINE[:-1]}", ":2: not a case record", id="cut"),
        pytest.param(f"{LINE}\n[{LINE}]\n", ":2: not a case record", id="list"),
        pytest.param(f'{LINE}\n{LINE[:-1]},"more":1}}\n', ":2: not a case record: more", id="unknown-key"),
        pytest.param(f"{LINE}\n{LINE.replace('1.0', 'NaN')}\n", ":2: not a case record: scores.completed", id="nan"),
        pytest.param(f"{LINE}\n".encode() + b"\xff\n", ":2: not UTF-8", id="utf8"),
    ],
)
def test_a_malformed_line_is_named_however_the_file_is_read(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(EvidenceError, match=said):
        read_cases(path)
    assert parse_rows(path.read_bytes()) is None


def test_a_file_is_read_with_and_without_its_last_newline_and_with_lines_inside_of_strings(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    records = [r.model_copy(update={"output": "a\nb}\n{c\u2028d"}) for r in make_cases([1, 0, 1])]
    for num in (1, 3):
        write_cases(path, records[:num])
        assert read_cases(path) == records[:num]
        path.write_bytes(path.read_bytes().removesuffix(b"\n"))
        assert read_cases(path) == records[:num]
    path.write_text(LINE + "\r\n" + LINE + "\r\n")
    assert len(read_cases(path)) == 2
    path.write_text("")
    assert read_cases(path) == []


@settings(deadline=None)
@given(
    texts=st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.floats(allow_nan=False, allow_infinity=False),
            st.sampled_from([None, "evaluator: x"]),
            st.sampled_from([None, COUNTS]),
        ),
        max_size=4,
    )
)
def test_rows_are_the_records_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[Any, ...]]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "cases.jsonl"
    records = [
        record.model_copy(
            update={
                "output": text,
                "scores": {"a": number, text: 1.0},
                "failure": failure,
                "latency_s": number,
                "speculation": counts,
                "buckets": ("b", text),
            }
        )
        for record, (text, number, failure, counts) in zip(make_cases([1.0] * len(texts)), texts, strict=True)
    ]
    write_cases(path, records)
    rows = parse_rows(path.read_bytes())
    assert rows is not None
    fields = [*CaseRecord.model_fields]
    assert [[getattr(row, name) for name in fields] for row in rows] == [
        [getattr(record, name) for name in fields] for record in read_cases(path)
    ]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("1.0", "1e999"),
        ("1.0", "Infinity"),
        ("1.0", "null"),
        ("1.0", '"1"'),
        ("1.0", "01"),
        ('"case-0"', "null"),
        ('"case-0"', r'"\ud800"'),
        ('"buckets":[]', '"buckets":[1]'),
        ('"speculation":null', '"speculation":{"method":"m"}'),
        ('"case_id":"case-0",', ""),
    ],
)
def test_what_is_no_record_is_no_row(was: str, now: str) -> None:
    assert was in LINE and parse_rows(LINE.encode()) is not None
    assert parse_rows(LINE.replace(was, now, 1).encode()) is None
