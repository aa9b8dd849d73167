"""Readers of other people's records: what real files say, and what must not pass for evidence.

The files in tests/golden/records were written by lm-eval 0.4.13 (its dummy model) and inspect_ai 0.3.285 (its mock
model); of results_*.json only what is read was kept, and sums.json is without its events.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvidenceError
from pipeline.outcomes import inspect_ai, lm_eval
from pipeline.outcomes.cases import Grouping, Outcomes
from pipeline.outcomes.registry import READERS, match_names, read_paired_table, read_side
from tests.fakes.outcome_tables import run
from tests.paths import ROOT

REAL = ROOT / "tests/golden/records"
SAMPLES = REAL / "samples_gen_2026-11-22T05-25-09.325403.jsonl"
RESULTS = "results_2026-11-22T05-25-09.325403.json"
PLAIN = Grouping()


def read_one(path: Path, grouping: Grouping = PLAIN) -> Outcomes:
    side = read_side(path, grouping)
    assert not side.problems, side.problems
    return next(iter(side.outcomes.values()))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lm_eval_samples_are_one_case_a_document_and_one_score_a_filter() -> None:
    found = read_one(SAMPLES)
    assert (found.name, found.format, [r.case_id for r in found.records]) == ("gen", "lm_eval", ["0", "1", "2", "3"])
    assert found.scores == ["exact_match,flexible-extract", "exact_match,strict-match"]  # bleu is none of a case
    assert [r.scores["exact_match,flexible-extract"] for r in found.records] == [0, 1, 0, 1]
    assert found.better["exact_match,strict-match"] == "higher"
    assert found.records[0].prompt == "Q: what is 0+0?\nA:" and found.records[0].output == "lol"


def test_an_lm_eval_answer_that_is_a_number_is_shown_and_a_likelihood_is_none(tmp_path: Path) -> None:
    rows = load_lines(SAMPLES)
    path = write_lines(tmp_path / SAMPLES.name, [row | {"resps": [["42"]]} for row in rows])
    assert read_one(path).records[0].output == "42"
    assert read_one(REAL / "samples_ppl_2026-11-22T05-31-11.604208.jsonl").records[0].output == ""


def test_lm_eval_choice_is_shown_as_the_likeliest_one() -> None:
    found = read_one(REAL / "samples_choices_2026-11-22T05-23-24.098361.jsonl")
    assert found.scores == ["acc"]
    assert found.records[0].output == "By van it takes 24 days to Oslo, and 13 with heat."


def test_a_choice_within_the_question_is_shown_with_it(tmp_path: Path) -> None:
    """What follows winogrande's choices is the same, so that each answer was shown as that."""
    choices = REAL / "samples_choices_2026-11-22T05-23-24.098361.jsonl"
    rows = load_lines(choices)
    for row in rows:
        asked = row["arguments"].items()
        row["arguments"] = {name: {"arg_0": f"It is{given['arg_1']}", "arg_1": " that came."} for name, given in asked}
    found = read_one(write_lines(tmp_path / choices.name, rows))
    assert found.records[0].output == "It is By van it takes 24 days to Oslo, and 13 with heat."


def test_how_many_choices_a_question_gives(tmp_path: Path) -> None:
    choices = REAL / "samples_choices_2026-11-22T05-23-24.098361.jsonl"
    assert {r.num_choices for r in read_one(choices).records} == {4}
    assert {r.num_choices for r in read_one(SAMPLES).records} == {0}
    rows = load_lines(choices)
    for row in rows:  # each choice once more, without the question
        asked = row["arguments"]
        row["arguments"] = asked | {f"gen_args_{4 + i}": a | {"arg_0": ""} for i, a in enumerate(asked.values())}
        row["acc_mutual_info"] = 1.0
    assert {r.num_choices for r in read_one(write_lines(tmp_path / choices.name, rows)).records} == {4}
    log = json.loads((REAL / "sums.json").read_text())
    for sample, target in zip(log["samples"], ("B", ["B"], ["A", "C"]), strict=False):
        sample |= {"choices": ["1", "2", "3"], "target": target}
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert [r.num_choices for r in read_one(tmp_path / "log.json").records][:4] == [3, 3, 0, 0]


def test_lm_eval_perplexity_is_a_ratio_over_words() -> None:
    found = read_one(REAL / "samples_ppl_2026-11-22T05-31-11.604208.jsonl")
    perplexity = found.definitions["word_perplexity"]
    assert (perplexity.estimator, perplexity.harm, perplexity.better) == ("ratio", "relative", "lower")
    assert found.records[0].scores[perplexity.score] == pytest.approx(0.2604923103919594)
    assert perplexity.weight is not None
    assert found.records[0].scores[perplexity.weight] == 3


@pytest.mark.parametrize(
    ("likelihood", "code", "shown"),
    [(-1.3, 20, "harm 10.52 %"), (-1.205, 0, "harm 0.50 %"), (-1.195, 0, "harm -0.50 %"), (-1.1, 10, "harm -9.52 %")],
    ids=["loss", "small-loss", "small-gain", "gain-to-look-at"],
)
def test_lambadas_perplexity_is_a_likelihood_of_each_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], likelihood: float, code: int, shown: str
) -> None:
    """lm-eval calls it by what it makes of all cases: a loss of 10 % was a gain, and a gain a loss."""
    first, sides = load_lines(SAMPLES)[0], []
    for side, value in (("a", -1.2), ("b", likelihood)):
        rows = [
            {k: v for k, v in first.items() if k not in ("exact_match", "bleu")}
            | {"doc_id": i, "doc": {"question": f"{i}"}, "doc_hash": f"d{i}", "prompt_hash": f"p{i}", "filter": "none"}
            | {"arguments": {"gen_args_0": {"arg_0": f"{i}", "arg_1": " end"}}, "resps": [[[f"{value}", "False"]]]}
            | {"metrics": ["perplexity"], "perplexity": value + i % 7 / 100}
            for i in range(300)
        ]
        (tmp_path / side).mkdir()
        sides.append(write_lines(tmp_path / side / SAMPLES.name, rows))
    found = read_one(sides[0])
    perplexity = found.definitions["perplexity"]
    assert (perplexity.estimator, perplexity.harm, perplexity.better) == ("ratio", "relative", "lower")
    assert found.records[0].scores == {"perplexity": 1.2, "perplexity units": 1}
    came, said = run("compare", *sides, "--metric", "perplexity", "--tolerance", 0.05, capsys=capsys)
    assert came == code and shown in said, said


def test_a_perplexity_of_each_case_stays_what_it_is(tmp_path: Path) -> None:
    rows = [row | {"metrics": ["perplexity"], "perplexity": 3.5} for row in load_lines(SAMPLES)]
    found = read_one(write_lines(tmp_path / SAMPLES.name, rows))
    assert not found.definitions and {r.scores["perplexity,strict-match"] for r in found.records} == {3.5}


@pytest.mark.parametrize(("picture", "code"), [("6f1e", 0), ("0b7c", 30)])
def test_documents_with_pictures_pair_by_their_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], picture: str, code: int
) -> None:
    """lm-eval's `doc_hash` of a picture is of its address in memory: no two runs of MMMU were comparable."""
    first, sides = load_lines(SAMPLES)[0], []
    for side, shown in (("a", "6f1e"), ("b", picture)):
        rows = [
            first
            | {"doc_id": i, "doc": {"question": "What is this?", "image": f"{shown} {i}"}, "prompt_hash": "p"}
            | {"doc_hash": f"{side} {i}", "filter": "none", "exact_match": 1.0, "resps": [[f"{side} {i}"]]}
            | {"arguments": {"gen_args_0": {"arg_0": "<image>", "arg_1": {}, "arg_2": {"visual": [f"{shown} {i}"]}}}}
            for i in range(200)
        ]
        (tmp_path / side).mkdir()
        sides.append(write_lines(tmp_path / side / SAMPLES.name, rows))
    assert len({record.cluster for record in read_one(sides[0]).records}) == 200
    came, said = run("compare", *sides, capsys=capsys)
    assert came == code and ("the document is another one" in said) == (code == 30), said


def test_a_document_of_ruler_has_the_score_of_its_own_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval gives other lengths -1: a mean over these hid most of a loss, and other lengths could not be judged."""
    first, sides, lengths = load_lines(SAMPLES)[0], [], [4096, 8192, 16384]
    for side, lost in (("a", 0), ("b", 12)):
        rows = [
            {k: v for k, v in first.items() if k not in ("exact_match", "bleu")}
            | {"doc_id": i, "doc": {"max_length": lengths[i % 3]}, "doc_hash": f"d{i}", "prompt_hash": f"p{i}"}
            | {
                "arguments": {"gen_args_0": {"arg_0": f"{i}", "arg_1": {}}},
                "resps": [[f"{side} {i}"]],
                "filter": "none",
            }
            | {"4096": -1.0, f"{lengths[i % 3]}": float(i % 3 > 0 or i // 3 >= lost)}
            for i in range(360)
        ]
        (tmp_path / side).mkdir()
        sides.append(write_lines(tmp_path / side / SAMPLES.name, rows))
        directions = {"higher_is_better": {"gen": {f"{length}": True for length in lengths}}}
        (tmp_path / side / RESULTS).write_text(json.dumps(directions))
    found = read_one(sides[1])
    assert found.scores == ["score"] and found.better == {"score": "higher"} and not found.problems
    code, said = run("compare", *sides, "--tolerance", 0.05, "--bucket", "max_length/4096=0.05", capsys=capsys)
    assert code == 20 and "gen/score [max_length/4096]\n      100.0 % -> 90.0 %" in said, said


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda rows: [*rows, rows[-1]], "document 3 is there twice under the filter 'flexible-extract'"),
        (lambda rows: [{k: v for k, v in row.items() if k != "doc_hash"} for row in rows], "lm-eval 0.4.3 or newer"),
        (lambda rows: [rows[0] | {"doc_id": "0"}], "a number as doc_id"),
        (lambda rows: [rows[0] | {"doc_id": True}], "a number as doc_id"),
        (lambda rows: [], "expected"),
    ],
)
def test_unfit_lm_eval_samples_are_refused_by_name(
    tmp_path: Path, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], said: str
) -> None:
    path = write_lines(tmp_path / SAMPLES.name, edit(load_lines(SAMPLES)))
    assert said in read_side(path, PLAIN).problems[0]


def test_a_document_that_a_filter_lost_is_no_score_of_that_filter(tmp_path: Path) -> None:
    """Without it the candidate would be judged on the documents that it happened to keep."""
    found = read_one(write_lines(tmp_path / SAMPLES.name, load_lines(SAMPLES)[:-1]))
    assert found.problems.keys() == {"exact_match,flexible-extract"}


def test_equal_documents_of_a_task_are_cases_of_one_cluster(tmp_path: Path) -> None:
    rows = load_lines(REAL / "samples_choices_2026-11-22T05-23-24.098361.jsonl")
    for row in rows:
        del row["doc"]["cluster"]
    twice = [*rows, *(row | {"doc_id": 9 + row["doc_id"]} for row in rows)]
    records = read_one(write_lines(tmp_path / "samples.jsonl", twice)).records
    assert len({r.input_digest for r in records}) == 6 and len({r.cluster for r in records}) == 3
    found = read_one(write_lines(tmp_path / "samples.jsonl", twice[:4]))
    assert [r.case_id for r in found.records] == ["0", "1", "2"]
    assert found.note and found.note.startswith("1 of 4 cases were left out, first '9', which asks what '0' asks")


def test_zip_and_json_of_one_inspect_log_say_the_same() -> None:
    packed, plain = read_one(REAL / "sums.eval"), read_one(REAL / "sums.json")
    assert packed.name == "sums" and packed.scores == ["f1", "match"] and packed.task == plain.task
    assert sorted(map(repr, packed.records)) == sorted(map(repr, plain.records))
    assert {r.scores["match"] for r in packed.records} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda log: log.update(status="error", error={"message": "no\nserver"}), "got status 'error' (no server)"),
        (lambda log: log.update(invalidated=True), "marked as invalid"),
        (lambda log: log["samples"].pop(), "expected 6 samples, as the log says, got 5"),
        (lambda log: log["samples"][0].update(error={"message": "boom"}), "1 of 6 cases have no judgement"),
        (lambda log: log["samples"].__setitem__(0, log["samples"][1]), "is there twice"),
        (lambda log: log.pop("eval"), "expected"),
    ],
)
def test_unfit_inspect_logs_are_refused_by_name(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    log = json.loads((REAL / "sums.json").read_text())
    edit(log)
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log))
    assert said in read_side(path, PLAIN).problems[0]


def test_a_log_cut_off_or_still_being_written_is_refused(tmp_path: Path) -> None:
    cut, under_way = tmp_path / "cut.eval", tmp_path / "way.eval"
    cut.write_bytes((REAL / "sums.eval").read_bytes()[:-500])
    with zipfile.ZipFile(under_way, "w") as archive:
        archive.writestr("_journal/start.json", "{}")
    assert "was it cut off?" in read_side(cut, PLAIN).problems[0]
    assert "under way or was killed" in read_side(under_way, PLAIN).problems[0]


def test_an_edited_byte_in_a_compressed_sample_is_found(tmp_path: Path) -> None:
    data = bytearray((REAL / "sums.eval").read_bytes())
    with zipfile.ZipFile(REAL / "sums.eval") as archive:
        info = archive.getinfo("samples/q0_epoch_1.json")
    data[info.header_offset + 400] ^= 1
    path = tmp_path / "edited.eval"
    path.write_bytes(data)
    with pytest.raises(EvidenceError, match=r"q0_epoch_1"):
        inspect_ai.read(path, PLAIN)


def test_epochs_are_cases_of_one_cluster(tmp_path: Path) -> None:
    log = json.loads((REAL / "sums.json").read_text())
    log["samples"] += [sample | {"epoch": 2} for sample in log["samples"]]
    log["results"]["total_samples"] = 12
    (tmp_path / "log.json").write_text(json.dumps(log))
    records = read_one(tmp_path / "log.json").records
    assert len({r.input_digest for r in records}) == 12 and len({r.cluster for r in records}) == 6


def test_message_ids_that_are_drawn_anew_make_no_other_question(tmp_path: Path) -> None:
    log = json.loads((REAL / "sums.json").read_text())
    digests = []
    for drawn in ("a", "b"):
        log["samples"][0]["input"] = [{"id": drawn, "role": "user", "content": "2+2"}]
        (tmp_path / "log.json").write_text(json.dumps(log))
        digests.append(read_one(tmp_path / "log.json").records[0].input_digest)
    assert digests[0] == digests[1]


def test_fields_of_a_document_or_metadata_make_clusters_and_buckets() -> None:
    found = read_one(REAL / "sums.eval", Grouping("level", ("level",)))
    assert {r.cluster for r in found.records} == {"easy"} and found.records[0].buckets == ("level/easy",)
    assert "expected a field 'topic'" in read_side(REAL / "sums.eval", Grouping("topic")).problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("case_id;score\na;1\n", "separated by commas"),
        ("case_id,score\na,1\nb\n", ":3: expected 2 cells"),
        ("case_id,score\na,1\na,1\n", ":3: case 'a' is there twice, first in"),
        ("case_id,score\na,1\na ,1\n", ":3: case 'a' is there twice, first in"),
        ("case_id,score\n,1\n", "expected a `case_id`, found none"),
        ("case_id,score\n", "expected at least one case"),
        ('case_id,score\na,"1\n', "not CSV"),
        ("case_id,reference,candidate\na,1,0\n", "give it alone"),
    ],
)
def test_malformed_tables_are_refused_with_their_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    assert said in read_side(path, PLAIN).problems[0]


def test_a_table_as_excel_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes('\ufeffcase_id,score,buckets\r\n"a, b",1,x;y\r\nc,0.5,\r\n'.encode())
    found = read_one(path)
    assert [r.case_id for r in found.records] == ["a, b", "c"] and found.records[0].buckets == ("x", "y")
    assert [r.scores["score"] for r in found.records] == [1, 0.5]


@pytest.mark.parametrize("cell", ["nan", "inf", "", "n/a", "1e999", "1_0"])
def test_what_is_no_finite_number_stands_in_the_way_of_its_own_score_alone(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"case_id,good,bad,model\na,1,0,x\nb,0,{cell},y\n")
    found = read_one(path)
    assert "expected a finite number as 'bad'" in found.problems["bad"] and ":3:" in found.problems["bad"]
    assert found.problems.keys() == {"bad"} and "model" not in found.scores


def test_nan_and_half_a_character_in_json_do_not_crash(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text('{"case_id": "a", "score": NaN, "output": "\\ud800"}\n{"case_id": "b", "score": 1}\n')
    found = read_one(path)
    assert "score" in found.problems and found.records[0].output == "?"
    path.write_text("[" * 100_000)
    assert "expected JSON" in read_side(path, PLAIN).problems[0]


def test_scores_of_an_object_are_read_and_one_named_twice_is_refused(tmp_path: Path) -> None:
    """Which of two would count is anybody's guess."""
    path = tmp_path / "table.jsonl"
    path.write_text('{"case_id": "a", "score": 0, "scores": {"exact": 1}}\n')
    assert read_one(path).records[0].scores == {"score": 0, "exact": 1}
    path.write_text('{"case_id": "a", "score": 0, "score": 1}\n')
    assert "table.jsonl:1: key 'score' is there twice; name it once" in read_side(path, PLAIN).problems[0]
    for scores in ('{"score": 1}', '"0.5"', "[1]"):
        path.write_text(f'{{"case_id": "a", "score": 0, "scores": {scores}}}\n')
        assert "table.jsonl:1: case 'a': expected `scores` as an object" in read_side(path, PLAIN).problems[0]


def test_tables_of_other_file_names_are_one_eval(tmp_path: Path) -> None:
    for name in ("before", "after"):
        (tmp_path / f"{name}.csv").write_text("case_id,score\na,1\n")
    sides = match_names(*(read_side(tmp_path / f"{name}.csv", PLAIN) for name in ("before", "after")))
    assert [list(side.outcomes) for side in sides] == [["outcomes"]] * 2


def test_two_runs_of_one_task_in_a_folder_are_refused(tmp_path: Path) -> None:
    """Which of them was meant nobody can tell; the older one may be the better."""
    for date in ("2026-11-22T05-25-09.325403", "2026-11-23T05-25-09.325403"):
        shutil.copy(SAMPLES, tmp_path / f"samples_gen_{date}.jsonl")
    assert "a second file of gen" in read_side(tmp_path, PLAIN).problems[0]


def test_a_paired_table_needs_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("case_id,reference\na,1\n")
    assert "found no 'candidate'" in read_paired_table(path, PLAIN)[0].problems[0]


def test_every_reader_is_registered_under_its_own_name() -> None:
    assert set(READERS) == {
        path.stem for path in (ROOT / "pipeline/outcomes").glob("*.py") if "FORMAT = " in path.read_text()
    }
    assert lm_eval.FORMAT in READERS


def test_one_prompt_under_many_ids_is_one_cluster(tmp_path: Path) -> None:
    rows = [{"case_id": str(i), "prompt": f"question {i % 3}", "score": 1} for i in range(12)]
    found = read_one(write_lines(tmp_path / "plain.jsonl", rows))
    assert len({r.cluster for r in found.records}) == 3
    told = read_one(write_lines(tmp_path / "told.jsonl", [row | {"cluster": row["case_id"]} for row in rows]))
    assert len({r.cluster for r in told.records}) == 3, "a cluster of the author's own splits no question"


@pytest.mark.parametrize(("yes", "no"), [("True", "False"), ("true", "false"), ("TRUE", "FALSE")])
def test_true_and_false_in_a_table_are_scores_and_stay_text_elsewhere(tmp_path: Path, yes: str, no: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"case_id,score,output\na,{yes},{no}\nb,{no},{yes}\n")
    found = read_one(path)
    assert not found.problems and [r.scores for r in found.records] == [{"score": 1}, {"score": 0}]
    assert [r.output for r in found.records] == [no, yes]


def test_columns_that_group_are_no_scores(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("case_id,document,level,score\na,1,1,1\nb,1,2,0\n")
    found = read_one(path, Grouping("document", ("level",)))
    assert found.scores == ["score"] and found.records[1].buckets == ("level/2",)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_byte_order_mark_is_skipped_and_utf_16_is_named(tmp_path: Path, suffix: str) -> None:
    text = {"csv": "case_id,score\r\na,1\r\n", "jsonl": '{"case_id": "a", "score": 1}\r\n'}[suffix]
    path = tmp_path / f"table.{suffix}"
    path.write_bytes(text.encode("utf-8-sig"))
    assert read_one(path).records[0].scores == {"score": 1}
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        path.write_bytes(text.encode(encoding))
        assert "looks like UTF-16" in read_side(path, PLAIN).problems[0]


@pytest.mark.parametrize("metric", ["f1", "candidate_f1"])
def test_a_number_of_no_side_is_no_score_of_a_paired_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    """It stood on both sides, so every candidate was as good as its reference in it, and passed."""
    rows = "".join(f"c{i},1,{i % 2},{i % 2}\n" for i in range(300))
    path = tmp_path / "table.csv"
    path.write_text(f"case_id,reference,candidate,{metric}\n{rows}")
    code, said = run("compare", path, "--metric", metric, capsys=capsys)
    assert code == 1 and f"--metric {metric}: no such metric; the reference has table/score" in said
    assert run("compare", path, capsys=capsys)[0] == 20


def test_a_paired_table_keeps_weights_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("case_id,reference,candidate,weight,page,kind,f1\na,3,2,4,p1,hard,0.5\n")
    for side in read_paired_table(path, Grouping("page", ("kind",))):
        outcomes = side.outcomes["table"]
        assert not side.problems and set(outcomes.scores) == {"score", "weight"}
        assert (outcomes.records[0].cluster, outcomes.records[0].buckets) == ("p1", ("kind/hard",))


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"config": {"message_limit": 5}}, {"config": {"message_limit": 500}}, "limits"),
        ({"config": {"token_limit": 500}}, {"config": {}}, "limits"),
        (
            {"model_roles": {"grader": {"model": "a/strict"}}},
            {"model_roles": {"grader": {"model": "a/kind"}}},
            "other models",
        ),
        ({"sandbox": {"type": "docker", "config": "/a/compose.yaml"}}, {"sandbox": {"type": "local"}}, "sandbox"),
        (
            {"sandbox": {"type": "docker", "config": "strict.yaml"}},
            {"sandbox": {"type": "docker", "config": "kind.yaml"}},
            "sandbox",
        ),
    ],
)
def test_logs_of_other_limits_another_grader_or_sandbox_do_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: dict[str, Any], theirs: dict[str, Any], said: str
) -> None:
    """A candidate that may work longer, elsewhere, or is graded more kindly, hides what it lost."""
    for name, about in (("a", ours), ("b", theirs)):
        log = json.loads((REAL / "sums.json").read_text())
        log["eval"] |= {**about, "model": name}
        (tmp_path / f"{name}.json").write_text(json.dumps(log))
    code, told = run("compare", tmp_path / "a.json", tmp_path / "b.json", "--metric", "match", capsys=capsys)
    assert code == 30 and f"sums: {said}: the reference has" in told


def test_a_role_of_the_evaluated_model_itself_is_the_same_on_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As is a sandbox by one file, wherever it lies."""
    for name in "ab":
        log = json.loads((REAL / "sums.json").read_text())
        log["eval"] |= {
            "model": name,
            "model_roles": {"solver": {"model": name}},
            "sandbox": {"type": "k8s", "config": {"values": f"/srv/{name}/compose.yaml", "chart": None}},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(log))
    code, _ = run("compare", tmp_path / "a.json", tmp_path / "b.json", "--metric", "match", capsys=capsys)
    assert code == 10  # six cases prove nothing


def test_a_document_that_is_another_one_under_a_second_filter_is_refused(tmp_path: Path) -> None:
    """Only the first filter's was compared with the other side's."""
    rows = load_lines(SAMPLES)
    for row in rows:
        if row["filter"] == "flexible-extract":
            row["doc_hash"] += "0"
    path = write_lines(tmp_path / SAMPLES.name, rows)
    assert "expected what it asks under its first filter" in read_side(path, PLAIN).problems[0]


def test_runs_of_other_numbers_of_answers_do_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best or most frequent of eight answers is not one answer."""
    for side, repeats in (("before", 1), ("after", 8)):
        (tmp_path / side).mkdir()
        (tmp_path / side / SAMPLES.name).write_text(SAMPLES.read_text() + "\n" * repeats)
        results = json.loads((REAL / RESULTS).read_text())
        results["configs"]["gen"]["repeats"] = repeats
        (tmp_path / side / RESULTS).write_text(json.dumps(results))
    code, said = run(
        "compare", tmp_path / "before", tmp_path / "after", "--metric", "exact_match,strict-match", capsys=capsys
    )
    assert code == 30 and "gen: repeats: the reference has 1, the candidate 8" in said


@pytest.mark.parametrize(
    ("ours", "theirs", "differ"),
    [
        ("def judge(doc, results): return strict(results)", "def judge(doc, results): return True", True),
        (None, "def judge(doc, results): return True", True),
        ("<function judge at 0x7f10>", "<function judge at 0x7F22>", False),  # where it was tells nothing
        ("def judge(doc, results): return 1", "<function judge at 0x7f22>", False),
        (
            "functools.partial(<function judge at 0x7f10>, k=1)",
            "functools.partial(<function judge at 0x7f22>, k=1)",
            False,
        ),
        ("def judge(doc, results): return 1", "def judge(doc, results): return 1", False),
    ],
)
def test_answers_that_other_code_judged_do_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: str | None, theirs: str, differ: bool
) -> None:
    """`process_results` gives the scores: an edit of it passed as a better or equal candidate."""
    for side, judge in (("before", ours), ("after", theirs)):
        (tmp_path / side).mkdir()
        (tmp_path / side / SAMPLES.name).write_text(SAMPLES.read_text() + "\n" * len(side))
        results = json.loads((REAL / RESULTS).read_text())
        results["configs"]["gen"] |= {} if judge is None else {"process_results": judge}
        (tmp_path / side / RESULTS).write_text(json.dumps(results))
    code, said = run(
        "compare", tmp_path / "before", tmp_path / "after", "--metric", "exact_match,strict-match", capsys=capsys
    )
    assert ("gen: judging: the reference has" in said) == differ, said
    assert code == 30 if differ else code in (10, 30)  # the same answers twice are refused, too


def test_more_buckets_than_can_be_judged_are_refused(tmp_path: Path) -> None:
    """4,000 buckets of one case each took 99 s, and memory that grows with their square."""
    path = tmp_path / "table.csv"
    path.write_text("case_id,score\n" + "".join(f"c{i},1\n" for i in range(1_001)))
    assert "expected 1,000 buckets at most" in read_side(path, Grouping(buckets=("case_id",))).problems[0]


def test_filters_are_the_same_wherever_their_functions_lay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """lm-eval's humaneval writes its filter by its address: two runs of one task were never comparable."""
    for side, address in (("before", "0x7fc993"), ("after", "0x7f3a24")):
        (tmp_path / side).mkdir()
        (tmp_path / side / SAMPLES.name).write_text(SAMPLES.read_text() + "\n" * len(side))
        results = json.loads((REAL / RESULTS).read_text())
        results["configs"]["gen"]["filter_list"] = [
            {"name": "f", "filter": [{"function": "custom", "filter_fn": f"<function build at {address}>"}]}
        ]
        (tmp_path / side / RESULTS).write_text(json.dumps(results))
    _, said = run(
        "compare", tmp_path / "before", tmp_path / "after", "--metric", "exact_match,strict-match", capsys=capsys
    )
    assert "gen: filters" not in said


def test_a_cluster_of_0_is_one(tmp_path: Path) -> None:
    """In JSONL it was none, and each of its cases a cluster of its own."""
    path = tmp_path / "t.jsonl"
    rows = [{"case_id": f"c{i}", "cluster": 0, "prompt": i, "target": i, "score": 1} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    empty: list[object] = [None, "", False, []]
    for none in empty:
        other = tmp_path / "none.jsonl"
        other.write_text("".join(json.dumps(row | {"cluster": none}) + "\n" for row in rows))
        assert len({r.cluster for r in next(iter(read_side(other, PLAIN).outcomes.values())).records}) == 3
    csv = tmp_path / "t.csv"
    csv.write_text("case_id,cluster,prompt,target,score\n" + "".join(f"c{i},0,{i},{i},1\n" for i in range(3)))
    both = [next(iter(read_side(file, PLAIN).outcomes.values())) for file in (path, csv)]
    assert all({record.cluster for record in outcomes.records} == {"0"} for outcomes in both)
    assert both[0].asked == both[1].asked and "target" in both[0].asked["c0"]


def test_documents_whose_cluster_is_null_are_their_own(tmp_path: Path) -> None:
    rows = load_lines(SAMPLES)
    for row in rows:
        row["doc"]["cluster"] = None
    path = write_lines(tmp_path / SAMPLES.name, rows)
    records = next(iter(read_side(path, PLAIN).outcomes.values())).records
    assert len({record.cluster for record in records}) == len(records) > 1


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    """Python's csv ends at 131,072 characters, which a prompt of a long context has."""
    path = tmp_path / "t.csv"
    path.write_text("case_id,prompt,score\n" + "".join(f"{i},{'long ' * 40_000}{i},1\n" for i in range(3)))
    assert len(next(iter(read_side(path, PLAIN).outcomes.values())).records) == 3


def test_an_index_without_a_name_is_no_score(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",case_id,score\n" + "".join(f"{i},q{i},1\n" for i in range(3)))
    assert next(iter(read_side(path, PLAIN).outcomes.values())).scores == ["score"]


@pytest.mark.parametrize(("depth", "fits"), [(150, True), (600, False)])
def test_json_that_is_nested_deep_is_one_line(tmp_path: Path, depth: int, fits: bool) -> None:
    """At 600 it was a traceback: what looks for white space calls itself."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"case_id": "a", "score": 1, "prompt": ' + "[" * depth + "]" * depth + "}\n")
    problems = read_side(path, PLAIN).problems
    assert not problems if fits else "expected 200 objects and lists in one another at most" in problems[0]


def test_samples_of_other_sandboxes_ask_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The eval's own sandbox alone was looked at; a sample may name another."""
    for name, kind in (("a", "docker"), ("b", "local")):
        log = json.loads((REAL / "sums.json").read_text())
        log["eval"]["model"] = name
        for i, sample in enumerate(log["samples"]):
            sample["sandbox"] = {"type": kind, "config": f"challenge{i}.yaml"}
        (tmp_path / f"{name}.json").write_text(json.dumps(log, separators=(", ", " : ")))
    code, said = run("compare", tmp_path / "a.json", tmp_path / "b.json", "--metric", "match", capsys=capsys)
    assert code == 30 and "the sandbox is another one on the candidate's side" in said, said


def test_a_score_that_nothing_gates_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """README says so; evals were, columns were not."""
    for name, other in (("a", 1), ("b", 0)):
        (tmp_path / f"{name}.csv").write_text(
            "case_id,score,other,output\n" + "".join(f"{i},1,{other},{name}\n" for i in range(400))
        )
    code, said = run("compare", tmp_path / "a.csv", tmp_path / "b.csv", "--metric", "score", capsys=capsys)
    assert code == 0 and "not gated: outcomes: other: no tolerance is set" in said, said
