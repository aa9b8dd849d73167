"""Tracking: what a run shows, and that logging twice changes nothing. MLflow is the real one."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import JournalError, SettingsError
from pipeline.gate.verdicts import Judgement
from pipeline.products.text.show import TextPresenter
from pipeline.records.evaluations import CaseRecord
from pipeline.records.files import write_text
from pipeline.records.reasons import Reason, ReasonKind
from pipeline.records.verdicts import Metric
from pipeline.report.mlflow_runs.predictions import MAX_CASES_PER_EVAL, MAX_TEXT, select_predictions
from pipeline.report.mlflow_runs.review_view import build_review
from pipeline.report.mlflow_runs.run_contents import RunContents, name_metrics
from pipeline.report.mlflow_runs.tracking import log_runs, write_pages
from scripts import show_pages
from tests.fakes.judging import build_runs, compare_release
from tests.fakes.synthetic_records import PRODUCT, Behaviour, make_params, write_tree
from tests.paths import ROOT

LOSSES = {"gptq-short": Behaviour(loss={"workflows": 0.3}), "awq-long": Behaviour(loss={"workflows": 0.01})}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Judgement, Path]:
    """A judgement over a reference, a bad candidate and a released one."""
    build = tmp_path_factory.mktemp("project") / "build"
    write_tree(build, LOSSES, num_cases=120)
    return compare_release(make_params(list(LOSSES), ["awq-long"]), build).judgement, build


@pytest.fixture
def runs(judged: tuple[Judgement, Path]) -> list[RunContents]:
    return build_runs(*judged)


def metric(name: str, value: float, bucket: str | None = None, unit: str = "") -> Metric:
    return Metric(name=name, bucket=bucket, value=value, unit=unit, better="higher", n=10)


def case(case_id: str, output: str = "out", **fields: Any) -> CaseRecord:
    same: dict[str, Any] = dict(input_digest="d", cluster="c", prompt="p", fingerprint="f")
    return CaseRecord(case_id=case_id, output=output, **same, **fields)


def test_reference_comes_first_and_every_run_says_its_verdict(runs: list[RunContents]) -> None:
    assert [run.candidate for run in runs] == ["reference", "gptq-short", "awq-long"]
    assert [run.params["gate"].split()[0] for run in runs][:2] == ["reference", "fail"]
    assert runs[2].params["gate"].endswith("(release)")
    assert runs[1].metrics["gate/passed"] == 0 and runs[1].metrics["gate/worst_loss_over_tolerance"] > 1
    assert "gate/passed" not in runs[0].metrics


def test_what_fails_beside_the_comparisons_is_counted(judged: tuple[Judgement, Path]) -> None:
    """A candidate that another path answers was a fail with none of them."""
    reasons = tuple(Reason(kind=kind, text="x") for kind in (ReasonKind.FAILED, ReasonKind.LOST, ReasonKind.NOTE))
    verdict = judged[0].verdicts[1].model_copy(update={"reasons": reasons})
    before, after = (
        build_runs(judged[0].model_copy(update={"verdicts": (own,)}), judged[1])[1].metrics["gate/num_fail"]
        for own in (judged[0].verdicts[1].model_copy(update={"reasons": ()}), verdict)
    )
    assert after == before + 1


def test_what_decides_nothing_is_no_loss_of_a_candidate(judged: tuple[Judgement, Path]) -> None:
    """A candidate that passed stood first by its "worst loss", which was of an advisory metric."""
    verdict = next(verdict for verdict in judged[0].verdicts if verdict.outcome == "fail")
    tiers = {"fail": "advisory", "inconclusive": "watched"}
    comparisons = tuple(c.model_copy(update={"tier": tiers.get(c.outcome, c.tier)}) for c in verdict.comparisons)
    own = verdict.model_copy(update={"comparisons": comparisons, "reasons": (), "outcome": "pass"})
    metrics = build_runs(judged[0].model_copy(update={"verdicts": (own,)}), judged[1])[1].metrics
    assert metrics["gate/num_fail"] == metrics["gate/num_inconclusive"] == 0
    assert metrics["gate/worst_loss_over_tolerance"] <= 1


def test_headline_is_the_first_gated_metric(runs: list[RunContents]) -> None:
    assert {next(iter(run.metrics)) for run in runs} == {"workflows/task_completion_percent"}


def test_names_say_the_scale_and_mlflow_takes_them(runs: list[RunContents]) -> None:
    named = name_metrics(
        (
            metric("w/task_completion_rate", 0.5),
            metric("p/kl_nats_per_token", 0.002, unit="nat/token"),
            metric("p/bits_per_byte", 1.25, unit="bit/byte"),
            metric("p/perplexity_per_token", 4.5),
            metric("w/task_completion_rate", 0.25, "steps: 2/4"),
        ),
        headline="",
    )
    assert named == {
        "w/task_completion_percent": 50,
        "p/kl_millinats_per_token": 2,
        "p/millibits_per_byte": 1250,
        "p/perplexity_per_token": 4.5,
        "w by bucket/steps_ 2_4 task_completion_percent": 25,
    }
    names = [name for run in runs for name in run.metrics]
    assert all(re.fullmatch(r"[\w.\- ]+/[\w.\- ]+", name) for name in names), "one level of section, no other slash"


def test_buckets_that_mlflow_would_spell_alike_stay_apart() -> None:
    rates = {"a_b": 0.1, "a/b": 0.2, "a:b": 0.3, "c/d": 0.4}
    named = name_metrics(tuple(metric("w/accuracy", v, bucket) for bucket, v in rates.items()), headline="")
    assert sorted(round(value) for value in named.values()) == [10, 20, 30, 40]
    assert named["w by bucket/a_b accuracy_percent"] == 10 and named["w by bucket/c_d accuracy_percent"] == 40
    assert all(re.fullmatch(r"w by bucket/a_b [0-9a-f]{8} accuracy_percent", name) for name in list(named)[1:3])


def test_the_longest_bucket_of_an_evalset_fits() -> None:
    longest = name_metrics(
        (
            metric("w" * 60 + "/tool_call_accepted_rate", 0.5, "b/" * 50),
            metric("w" * 60 + "/tool_call_accepted_rate", 0.5, "b_" * 50),
        ),
        headline="",
    )
    assert max(map(len, longest)) <= 250, "MLflow's limit"


def test_a_note_is_safe_markdown(judged: tuple[Judgement, Path]) -> None:
    verdict = (
        judged[0].verdicts[0].model_copy(update={"reasons": (Reason(kind=ReasonKind.LOST, text="x\n# <b>PASS</b>"),)})
    )
    notes = [run.note for run in build_runs(judged[0].model_copy(update={"verdicts": (verdict,)}), judged[1])]
    assert "fail: x\\n# &lt;b>PASS&lt;/b>" in notes[1]


def test_tripwires_are_shown(runs: list[RunContents]) -> None:
    assert any("kl_millinats" in name for name in runs[1].metrics)


def test_at_most_ten_params(runs: list[RunContents]) -> None:
    assert all(0 < len(run.params) <= 10 for run in runs)
    assert all(len(value) < 200 for run in runs for value in run.params.values())


def test_every_run_shows_the_same_cases_flips_first(runs: list[RunContents]) -> None:
    assert len({tuple(run.predictions["id"]) for run in runs}) == 1
    reference, candidate = runs[0].predictions, runs[1].predictions
    assert reference["ok"][0] != candidate["ok"][0]
    assert candidate["output"][0].startswith(candidate["ok"][0])


def test_a_review_opens_on_what_decides(runs: list[RunContents]) -> None:
    """MLflow takes the first three parameters by name for its plot; a column that no run has stays empty."""
    reference, failed, _ = runs
    assert sorted(failed.params)[:3] == ["gate", "layers", "mib"]
    columns = [
        re.sub(r".*`(.*)`", r"\1", column) for column in build_review(next(iter(reference.metrics)))["selectedColumns"]
    ]
    assert columns[-1] == "Description" and set(columns[:-1]) <= {*failed.params, *failed.metrics}


def test_selection_keeps_late_flips_when_cases_are_many() -> None:
    def scored(wrong: int | None) -> dict[str, Any]:
        return {"calls": {str(i): (case(str(i)), i != wrong) for i in range(MAX_CASES_PER_EVAL + 100)}}

    last = MAX_CASES_PER_EVAL + 99
    tables = select_predictions(
        {"reference": scored(None), "a": scored(last), "b": scored(7)}, "reference", TextPresenter()
    )
    assert tables["a"]["id"][:2] == ["calls/7", f"calls/{last}"]
    assert tables["a"]["ok"][:2] == ["right", "WRONG"] and tables["b"]["ok"][:2] == ["WRONG", "right"]
    assert {len(column) for table in tables.values() for column in table.values()} == {MAX_CASES_PER_EVAL}


def test_what_candidates_lost_stands_above_what_nobody_lost_whatever_the_eval() -> None:
    """The first eval's 200 rows that nobody lost hid all losses of the next one."""
    right, wrong = (case("1"), True), (case("1"), False)
    scored: dict[str, Any] = {
        "reference": {"choices": {"1": right, "2": wrong}, "calls": {"1": right}},
        "a": {"choices": {"1": right, "2": right}, "calls": {"1": wrong}},
    }
    tables = select_predictions(scored, "reference", TextPresenter())
    assert tables["a"]["id"] == ["calls/1", "choices/1", "choices/1"]
    assert tables["a"]["ok"] == ["WRONG", "right", "right"], "a loss, then a gain, then no flip"


def test_missing_failed_and_long_cases_are_told_apart() -> None:
    failed = case("2", failure="infrastructure: timeout")
    tables = select_predictions(
        {
            "reference": {"calls": {k: (case(k, "x" * (MAX_TEXT + 5)), True) for k in ("1", "2")}},
            "a": {"calls": {"2": (failed, None)}},
        },
        "reference",
        TextPresenter(),
    )
    assert sorted(tables["a"]["ok"]) == ["infrastructure: timeout", "missing"]
    assert all(text.endswith("characters)") for text in tables["reference"]["output"])


def test_a_refused_candidate_without_records_is_still_a_run(judged: tuple[Judgement, Path], tmp_path: Path) -> None:
    build = tmp_path / "build"
    shutil.copytree(judged[1], build)
    shutil.rmtree(build / "evaluations" / "gptq-short")
    params = make_params(list(LOSSES), ["awq-long"])
    run = build_runs(compare_release(params, build).judgement, build)[1]
    assert run.params["gate"] == "refused" and "no predictions" in run.note
    assert set(run.predictions["ok"]) == {"missing"}


def test_traces_are_artifacts_of_their_run_and_a_line_of_its_note(
    judged: tuple[Judgement, Path], tmp_path: Path
) -> None:
    build = tmp_path / "build"
    shutil.copytree(judged[1], build)
    trace = build / "evaluations/awq-long/traces/server-0.json.gz"
    trace.parent.mkdir()
    trace.write_bytes(b"trace")
    runs = build_runs(judged[0], build)
    assert [str(trace) in run.note for run in runs] == [False, False, True]
    *_, traced = log_runs(runs, tmp_path, product=PRODUCT)
    (artifact,) = open_client(tmp_path).list_artifacts(traced.run_id, "traces")
    assert artifact.path == "traces/server-0.json.gz"


def open_client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")


def list_names(root: Path, product: str = PRODUCT) -> list[str]:
    client = open_client(root)
    experiment = client.get_experiment_by_name(f"quantgate {product}")
    return [run.info.run_name for run in client.search_runs([experiment.experiment_id])]


def test_logging_twice_adds_nothing_and_a_new_verdict_replaces(runs: list[RunContents], tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text("# report")
    first = log_runs(runs, tmp_path, product=PRODUCT, attachments=[report, tmp_path / "none.png"])
    assert [run.is_new for run in first] == [True] * 3
    assert list_names(tmp_path) == ["reference", "gptq-short", "awq-long"], "listed in the order of the report"

    again = log_runs(runs, tmp_path, product=PRODUCT)
    assert [(run.run_id, run.is_new) for run in again] == [(run.run_id, False) for run in first]

    changed = RunContents(**{**vars(runs[1]), "key": "another verdict"})
    log_runs([changed], tmp_path, product=PRODUCT)
    assert sorted(list_names(tmp_path)) == ["awq-long", "gptq-short", "reference"], "one run per candidate"
    back = log_runs([runs[1]], tmp_path, product=PRODUCT)
    assert back[0].run_id == first[1].run_id and not back[0].is_new, "a verdict that returns brings its run back"

    log_runs([changed], tmp_path, product=PRODUCT, dvc_experiment="sweep-1")
    assert sorted(list_names(tmp_path)) == ["awq-long", "gptq-short", "gptq-short (sweep-1)", "reference"]
    # git and DVC take an apostrophe in the name of an experiment, a query of MLflow ends at it
    named = [log_runs([changed], tmp_path, product="named", dvc_experiment="o'brien")[0] for _ in range(2)]
    assert [run.is_new for run in named] == [True, False]

    (other,) = log_runs([runs[1]], tmp_path, product="other")
    assert other.is_new and list_names(tmp_path, "other") == ["gptq-short"], "another product has its own experiment"
    assert sorted(list_names(tmp_path)) == ["awq-long", "gptq-short", "gptq-short (sweep-1)", "reference"]

    client = open_client(tmp_path)
    assert {item.path for item in client.list_artifacts(first[1].run_id)} == {"predictions.json", "report.md"}
    run = client.get_run(first[1].run_id)
    assert run.data.tags["pipeline"] == "quantgate" and run.data.params == runs[1].params
    assert run.data.metrics == pytest.approx(runs[1].metrics)
    (table,) = (tmp_path / "mlartifacts").glob(f"{first[1].run_id}/artifacts/predictions.json")
    assert json.loads(table.read_text())["columns"] == ["id", "output", "ok", "prompt", "eval"]

    copy = tmp_path / "copy"  # the client keeps a store that it has opened
    copy.mkdir()
    shutil.copy(tmp_path / "mlflow.db", copy)
    with sqlite3.connect(copy / "mlflow.db") as database:
        database.execute("update alembic_version set version_num = 'f00d'")
    assert "Detected out-of-date database schema (found version f00d, but expected " in refusal(runs, copy)

    pages = {}
    for name, has_pictures in ((PRODUCT, False), ("other", True)):
        write_pages(first, tmp_path, product=name, has_pictures=has_pictures)
        pages[name] = (tmp_path / f"mlartifacts/pages-{name}.txt").read_text()
    assert all(first[0].run_id in text for text in pages.values())
    words = [line.split()[0] for line in pages[PRODUCT].splitlines()]
    assert words == [f"{PRODUCT}:", "runs", "compare", "charts", "predictions"], "each product's pages under its name"
    assert pages["other"].splitlines()[-1].startswith("  images "), "pictures have a page of their own"


def test_pages_of_a_product_that_is_gone_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    for name in ("gone", "shots"):
        write_text(Path(f"mlartifacts/pages-{name}.txt"), f"{name} #/runs\n")
    assert show_pages.main(["http://host:1"]) == 0
    assert capsys.readouterr().out == "shots http://host:1/#/runs\n"


@pytest.mark.parametrize("given", [[], ["http://host:1", "http://host:2"]])
def test_pages_are_below_one_address(given: list[str]) -> None:
    with pytest.raises(SettingsError, match="^expected one address, such as http://127.0.0.1:5000, got '"):
        show_pages.main(given)


def refusal(runs: list[RunContents], root: Path) -> str:
    with pytest.raises(JournalError) as caught:
        log_runs(runs, root, product=PRODUCT)
    assert str(caught.value).startswith(f"{root / 'mlflow.db'}: expected a store that MLflow can write, got ")
    assert "; if it is damaged or of another version, move it away and run `dvc repro " in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_store_is_one_line(runs: list[RunContents], tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"\0garbage" * 1000)
    assert "DatabaseError: (sqlite3.DatabaseError) file is not a database; " in refusal(runs, tmp_path)


def test_a_store_of_an_unknown_version_is_one_line(runs: list[RunContents], tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("create table alembic_version (version_num varchar(32) not null)")
        database.execute("insert into alembic_version values ('f00d')")
    assert "CommandError: Can't locate revision identified by 'f00d'; " in refusal(runs, tmp_path)
