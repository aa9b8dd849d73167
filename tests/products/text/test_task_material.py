"""Scores of an lm-eval task belong to what it asked: when that changes, wherever it lies, it is asked anew."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gzip
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipeline.products.text.evals.evaluate as evaluate_module
from pipeline.errors import SettingsError
from pipeline.products.text.evals import jobs
from pipeline.products.text.evals.evaluate import evaluate_candidate
from pipeline.products.text.evals.generation import join_repeats
from pipeline.products.text.evals.known_tasks import digest_evalsets
from pipeline.products.text.evals.material import load_task, quiet, read_fresh
from pipeline.products.text.serving.client import TokenScores
from pipeline.products.text.settings import HarnessEval, TextProduct
from pipeline.records.evaluations import CaseRecord, read_cases
from tests.fakes.synthetic_records import make_candidate, make_params
from tests.products.text.test_evaluate import FakeEndpoint as ChatEndpoint
from tests.products.text.test_evaluate import FakeEngine

CASES = [{"question": f"What is {i}?", "answer": f"a{i}"} for i in range(4)]
EDITED = [CASES[0] | {"question": "Who is 0 ?"}, *CASES[1:]]  # of the same length, so a file keeps its size
TASK = {
    "task": "mine",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": ["yes", "no"],
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}],
}
Write = Callable[[Path, list[dict[str, str]]], None]


class FakeEndpoint(ChatEndpoint):
    """Scores whatever it is given alike, and counts it."""

    async def tokenize(self, texts: list[str], **_: Any) -> list[list[int]]:
        return [[1] * max(1, len(text.split())) for text in texts]

    async def score(self, batch: list[list[int]], **_: Any) -> list[TokenScores]:
        self.asked += [str(ids) for ids in batch]
        return [
            TokenScores(np.zeros(len(b) - 1, "f4"), np.ones((len(b) - 1, 1), "i4"), np.zeros((len(b) - 1, 1), "f4"))
            for b in batch
        ]

    @contextlib.asynccontextmanager
    async def start(self, *_: Any, **__: Any) -> AsyncIterator[tuple[FakeEngine, FakeEndpoint]]:
        yield FakeEngine(self), self


def write_lines(path: Path, cases: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))


def write_list(path: Path, cases: list[dict[str, str]]) -> None:
    path.write_text(json.dumps(cases))


def write_csv(path: Path, cases: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cases[0]))
        writer.writeheader()
        writer.writerows(cases)


def write_parquet(path: Path, cases: list[dict[str, str]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(cases), path)


def write_text(path: Path, cases: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{case['question']}\n" for case in cases))


def write_gzip(path: Path, cases: list[dict[str, str]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(case) + "\n" for case in cases).encode(), mtime=0))


FORMATS: dict[str, tuple[str, Write]] = {
    "json": ("json", write_list),
    "csv": ("csv", write_csv),
    "parquet": ("parquet", write_parquet),
    "txt": ("text", write_text),
    "json.gz": ("json", write_gzip),
}


def replace_quietly(path: Path, edit: Callable[[], object]) -> None:
    """Edit a file and give it its old time of modification back, as a checkout or a copy may."""
    before = path.stat()
    edit()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Project:
    """A project with one eval, an lm-eval task of the user's own."""

    def __init__(self, root: Path, endpoint: FakeEndpoint) -> None:
        self.root = root
        self.endpoint = endpoint
        checkpoint = root / make_candidate("a").checkpoint.path
        checkpoint.mkdir(parents=True)
        (checkpoint / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
        (root / "tasks").mkdir()
        (root / "data").mkdir()

    def write_task(self, **keys: Any) -> None:
        (self.root / "tasks/mine.yaml").write_text(json.dumps(TASK | keys))  # JSON is YAML

    def run(self, **settings: Any) -> list[CaseRecord]:
        """Evaluate, as the stage does from the project's root; return the records."""
        self.endpoint.asked.clear()
        evals = {"e": {"kind": "harness", "task": "mine", "include_path": "tasks"} | settings}
        params = TextProduct.model_validate(make_params(["a"], ["a"]).model_dump() | {"evals": evals})
        asyncio.run(evaluate_candidate(make_candidate("a"), params, root=Path(), build=Path("build")))
        return read_cases(Path("build/evaluations/a/e.jsonl"))

    def watched(self, **settings: Any) -> str:
        """Return what DVC watches."""
        evals = {"e": {"kind": "harness", "task": "mine", "include_path": "tasks"} | settings}
        params = TextProduct.model_validate(make_params(["a"], ["a"]).model_dump() | {"evals": evals})
        return digest_evalsets(params, Path())["e"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    endpoint = FakeEndpoint()
    monkeypatch.setattr(evaluate_module, "start_engine", endpoint.start)
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path, endpoint)


def check_asked_anew(project: Project, path: Path, edit: Callable[[], object], **settings: Any) -> list[CaseRecord]:
    """Run twice, edit a file without a trace in its size and time, run again: the second asks nothing, the third all.

    What DVC watches must change with it, else the stage is not run at all.
    """
    project.run(**settings)
    num_asked, watched = len(project.endpoint.asked), project.watched(**settings)
    project.run(**settings)
    assert not project.endpoint.asked, "nothing was edited"
    assert project.watched(**settings) == watched
    replace_quietly(path, edit)
    records = project.run(**settings)
    assert len(project.endpoint.asked) == num_asked
    assert project.watched(**settings) != watched
    return records


@pytest.mark.parametrize("folder", ["tasks", "data"])
@pytest.mark.parametrize("suffix", ["json", "csv", "parquet", "txt", "json.gz"])
def test_an_edited_case_is_asked_anew_whatever_file_it_is_in(project: Project, folder: str, suffix: str) -> None:
    builder, write = FORMATS[suffix]
    path = Path(folder, f"cases.{suffix}")
    write(path, CASES)
    text = "{{text}}" if suffix == "txt" else "{{question}}"
    project.write_task(dataset_path=builder, dataset_kwargs={"data_files": {"test": str(path)}}, doc_to_text=text)
    records = check_asked_anew(project, path, lambda: write(path, EDITED))
    assert [record.prompt for record in records] == [case["question"] for case in EDITED]


NAMES: dict[str, dict[str, Any]] = {
    "a name": {"dataset_path": "json", "dataset_kwargs": {"data_files": "data/test.jsonl"}, "test_split": "train"},
    "a list": {"dataset_path": "json", "dataset_kwargs": {"data_files": ["data/test.jsonl"]}, "test_split": "train"},
    "a list by split": {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": ["data/test.jsonl"]}}},
    "a pattern": {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data/t*.jsonl"}}},
    "a folder of data": {"dataset_path": "json", "dataset_kwargs": {"data_dir": "data"}},
    "a data set's folder": {"dataset_path": "data"},
}


@pytest.mark.parametrize("keys", NAMES.values(), ids=NAMES)
def test_an_edited_case_is_asked_anew_however_its_file_is_named(project: Project, keys: dict[str, Any]) -> None:
    path = Path("data/test.jsonl")
    write_lines(path, CASES)
    project.write_task(**keys)
    records = check_asked_anew(project, path, lambda: write_lines(path, EDITED))
    assert records[0].prompt == EDITED[0]["question"]


@pytest.mark.parametrize("kind", ["group", "tag"])
def test_members_of_a_group_are_one_suite_with_a_bucket_each(project: Project, kind: str) -> None:
    """A task such as mmlu was asked as a whole, and then failed with "KeyError: 'mmlu'"."""
    cases: list[dict[str, Any]] = [case | {"id": f"q-{i}", "buckets": ["own"]} for i, case in enumerate(CASES)]
    write_lines(Path("data/test.jsonl"), cases)
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data/test.jsonl"}}}
    tag = {"tag": "both"} if kind == "tag" else {}
    project.write_task(**files, **tag)
    other = TASK | files | tag | {"task": "other", "doc_to_text": "Other: {{question}}", "doc_to_target": 1}
    Path("tasks/other.yaml").write_text(json.dumps(other))
    if kind == "group":
        Path("tasks/both.yaml").write_text(json.dumps({"group": "both", "task": ["mine", "other"]}))
    records = sorted(project.run(task="both"), key=lambda record: record.case_id)
    assert [record.case_id for record in records] == [f"{task}/q-{i}" for task in ("mine", "other") for i in range(4)]
    assert [record.buckets for record in records] == [("mine", "own")] * 4 + [("other", "own")] * 4
    assert [record.scores["accuracy"] for record in records] == [1.0] * 4 + [0.0] * 4
    assert records[4].prompt == "Other: What is 0?" and records[4].num_choices == 2
    known = load_task("e", HarnessEval(kind="harness", task="both", include_path="tasks")).documents
    assert sorted(buckets for _, buckets in known) == [record.buckets for record in records]


WORDS = {"output_type": "generate_until", "doc_to_target": "{{answer}}", "doc_to_choice": None}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (WORDS, "mine has the metric acc, which gives ['a0', 'a0'] for an answer, expected a number; name a metric"),
        (WORDS | {"metric_list": [{"metric": "f1"}]}, "mine has the metrics f1; expected one of acc, exact_match"),
        (WORDS | {"doc_to_choice": ["a0"]}, "lm-eval can't judge generate_until answers by the metrics of 'mine': "),
        ({"metric_list": [{"metric": "acc_norm"}]}, "mine has the metrics acc_norm; expected one of acc, exact_match"),
        (WORDS | {"metric_list": [{"metric": "exact_match"}]}, None),
        ({"output_type": "loglikelihood", "doc_to_target": " {{answer}}", "doc_to_choice": None}, None),
    ],
    ids=["of-choices", "of-all", "that-fail", "unknown", "of-words", "of-one-text"],
)
def test_metrics_that_can_not_judge_are_told_before_any_work(
    project: Project, keys: dict[str, Any], problem: str | None
) -> None:
    write_lines(Path("data/test.jsonl"), CASES)
    project.write_task(dataset_path="json", dataset_kwargs={"data_files": {"test": "data/test.jsonl"}}, **keys)
    if problem is None:
        project.watched()
        return
    with pytest.raises(SettingsError) as caught:
        project.watched()
    assert str(caught.value).startswith(f"products.agent.evals.e.task: {problem}")


LINES = WORDS | {
    "doc_to_target": "{{answer}}\nThat is all.",
    "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": ["\n"]},
}
ANSWER = {"doc_to_target": "{{answer}}"}


@pytest.mark.parametrize(
    ("keys", "is_refused"),
    [
        (LINES, True),
        (LINES | {"generation_kwargs": {"until": ["\n\n"]}}, False),
        (LINES | ANSWER, False),
        (LINES | {"doc_to_target": "{{'a\nb' if question == 'What is 0?' else answer}}"}, False),
        (LINES | {"metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["(?s)\n.*"]}]}, False),
    ],
    ids=["each", "another", "one-line", "one-answer", "ignored"],
)
def test_answers_that_their_stop_string_cuts_are_told_before_any_work(
    project: Project, keys: dict[str, Any], is_refused: bool
) -> None:
    """Both sides were wrong in every case, so that no loss could show; a few such answers are the task's own."""
    write_lines(Path("data/test.jsonl"), CASES)
    project.write_task(dataset_path="json", dataset_kwargs={"data_files": {"test": "data/test.jsonl"}}, **keys)
    if not is_refused:
        project.watched()
        return
    with pytest.raises(
        SettingsError, match=r"ends each answer at '\\n' .*4 of its 4 right answers .*'mine-0': 'a0\\nThat is all"
    ):
        project.watched()


@pytest.mark.parametrize(("num_wrong", "is_refused"), [(2, False), (3, True)])  # of 4
@pytest.mark.parametrize("from_end", [False, True])
def test_each_answer_that_holds_a_stop_string_is_judged(
    project: Project, num_wrong: int, is_refused: bool, from_end: bool
) -> None:
    """The first one stood for all: one like no other had a good task refused, or a useless one run."""
    cases = [case | {"answer": "so\n7" if i < num_wrong else "7\nso"} for i, case in enumerate(CASES)]
    write_lines(Path("data/test.jsonl"), cases[::-1] if from_end else cases)
    ignored = [{"metric": "exact_match", "regexes_to_ignore": ["(?<=7)\n.*", "so\n"]}]
    files = {"data_files": {"test": "data/test.jsonl"}}
    project.write_task(dataset_path="json", dataset_kwargs=files, **LINES | {"metric_list": ignored, **ANSWER})
    with pytest.raises(SettingsError, match="3 of its 4 right") if is_refused else contextlib.nullcontext():
        project.watched()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"doc_to_targets": 0}, "mine: unknown key 'doc_to_targets'; is `doc_to_target` meant"),
        ({"test_split": "tset"}, "mine: test_split: its documents have no split 'tset'; correct it"),
        (
            {"metric_list": [{"metric": "exactmatch"}]},
            "mine: metric_list: expected acc or exact_match, got 'exactmatch'; is `exact_match` meant",
        ),
    ],
    ids=["key", "split", "metric"],
)
def test_a_mistake_in_a_tasks_file_names_its_key(
    project: Project, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], said: str
) -> None:
    """lm-eval's own words are KeyError: None, KeyError: 'tset', and TaskConfig.__init__()."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it looks for a metric there
    write_lines(Path("data/test.jsonl"), CASES)
    project.write_task(**{"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data/test.jsonl"}}} | keys)
    with pytest.raises(SettingsError) as caught:
        project.watched()
    assert str(caught.value) == f"products.agent.evals.e.task: {said}"


def test_answers_that_another_release_judged_are_asked_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its filters and metrics are in no file of a task: a new candidate was judged by others than the reference."""
    write_lines(Path("data/test.jsonl"), CASES)
    project.write_task(dataset_path="json", dataset_kwargs={"data_files": {"test": "data/test.jsonl"}})
    project.run()
    num_asked = len(project.endpoint.asked)
    monkeypatch.setattr(jobs, "version", lambda library: f"another {library}")
    project.run()
    assert len(project.endpoint.asked) == num_asked > 0


@pytest.mark.parametrize("best", [0, 1])
def test_the_output_of_a_choice_in_the_question_tells_which_was_chosen(
    project: Project, monkeypatch: pytest.MonkeyPatch, best: int
) -> None:
    """As in winogrande: what follows is the same for all, so that no other choice was a changed answer."""
    write_lines(Path("data/test.jsonl"), [{"question": "Ann met Bob, as", "answer": "was here."}])
    project.write_task(
        dataset_path="json",
        dataset_kwargs={"data_files": {"test": "data/test.jsonl"}},
        doc_to_choice="{{[question + ' she', question + ' the tall he']}}",
        doc_to_text=0,
        doc_to_target="{{answer}}",
    )
    like(project, monkeypatch, lambda ids: (len(ids) > 7) == bool(best))
    (record,) = project.run()
    assert record.output == ["Ann met Bob, as she", "Ann met Bob, as the tall he"][best]
    assert record.scores == {"accuracy": 1.0 - best}


def test_the_output_of_one_scored_text_tells_whether_greedy_decoding_gives_it(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in lambada: it was the log-probability, whose last digits made each answer a changed one."""
    write_lines(Path("data/test.jsonl"), [{"question": "Ann met", "answer": "Bob"}, {"question": "Ann", "answer": "x"}])
    project.write_task(
        dataset_path="json",
        dataset_kwargs={"data_files": {"test": "data/test.jsonl"}},
        output_type="loglikelihood",
        doc_to_target=" {{answer}}",
        doc_to_choice=None,
    )
    like(project, monkeypatch, lambda ids: len(ids) > 2)
    assert [(r.output, r.scores["accuracy"]) for r in project.run()] == [("Bob", 1.0), ("(something else)", 0.0)]


def like(project: Project, monkeypatch: pytest.MonkeyPatch, likes: Callable[[list[int]], bool]) -> None:
    """Have the endpoint find some texts likely, and others neither that nor what greedy decoding gives."""

    async def score(batch: list[list[int]], **_: Any) -> list[TokenScores]:
        return [
            TokenScores(
                np.full(len(ids) - 1, -0.1 if likes(ids) else -9.0, "f4"),
                np.full((len(ids) - 1, 1), 1 if likes(ids) else 2, "i4"),
                np.zeros((len(ids) - 1, 1), "f4"),
            )
            for ids in batch
        ]

    monkeypatch.setattr(project.endpoint, "score", score)


def test_an_answer_without_a_token_of_its_own_is_refused(project: Project) -> None:
    """It was scored as the whole text, which no other answer is as unlikely as: it was never picked."""
    write_lines(Path("data/test.jsonl"), CASES)
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data/test.jsonl"}}}
    project.write_task(**files, doc_to_choice=["yes", "no"], target_delimiter="")
    said = "e: expected an answer of a token or more behind the question of case 'mine-0', got 'yes'"
    with pytest.raises(SettingsError, match=said):
        project.run()


@pytest.mark.parametrize("num_fewshot", [0, 1])
def test_equal_questions_are_one_cluster_whatever_their_fields_say(project: Project, num_fewshot: int) -> None:
    """Ten questions copied twenty times, each with an id and a cluster of its own, proved a loss of 1.79 points."""
    cases = [CASES[i % 2] | {"id": f"q-{i}", "cluster": f"c-{i}"} for i in range(6)]
    write_lines(Path("data/test.jsonl"), cases)
    files = {"test": "data/test.jsonl", "train": "data/test.jsonl"}
    project.write_task(dataset_path="json", dataset_kwargs={"data_files": files}, training_split="train")
    records = project.run(num_fewshot=num_fewshot)
    assert len({record.prompt for record in records}) == (3 if num_fewshot else 2)
    assert [record.cluster for record in records] == ["c-0", "c-1"] * 3
    assert len({record.case_id for record in records}) == len({record.input_digest for record in records}) == 6
    settings = HarnessEval(kind="harness", task="mine", include_path="tasks", num_fewshot=num_fewshot)
    assert [cluster for cluster, _ in load_task("e", settings).documents] == ["c-0", "c-1"] * 3


def test_a_question_that_is_in_two_clusters_joins_them() -> None:
    """Forty questions, each once alone and once in one cluster of all, were forty clusters of two."""
    asked = [[[f"question {i % 40}", "yes"]] for i in range(80)]
    clusters = [f"own-{i}" for i in range(40)] + ["all"] * 40
    joined = join_repeats([{}] * 80, asked, clusters, num_fewshot=0)
    assert joined == ["own-0"] * 80
    assert join_repeats([{}] * 2, asked[:2], clusters[:2], num_fewshot=0) == clusters[:2]


def test_an_edited_example_is_asked_with_anew(project: Project) -> None:
    files = {"test": "data/test.json", "train": "data/shots.json"}
    for file in files.values():
        write_list(Path(file), CASES)
    project.write_task(dataset_path="json", dataset_kwargs={"data_files": files}, training_split="train")
    path = Path(files["train"])
    records = check_asked_anew(project, path, lambda: write_list(path, EDITED), num_fewshot=4)
    assert all("Who is 0" in record.prompt for record in records)


CODE = """
import json
from pathlib import Path
def read_documents(documents):
    return documents.map(lambda document: document | {"question": Path("data/text").read_text()})
def write_prompt(document):
    from data import phrases
    return phrases.START + document["question"]
def read_results(document, results):
    return {"acc": float(Path("tasks/right.txt").read_text() == "yes")}
"""


@pytest.mark.parametrize(
    ("file", "text", "keys"),
    [
        (
            "tasks/code.py",
            CODE.replace("phrases.START +", "phrases.START*1+"),
            "doc_to_text: !function code.write_prompt",
        ),
        ("tasks/right.txt", "no!", "process_results: !function code.read_results"),
        ("data/phrases.py", "START = 'Dear '", "doc_to_text: !function code.write_prompt"),
        ("data/text", "Why?", "process_docs: !function code.read_documents"),
        ("data/base.yaml", 'description: "To be"', "include: ../data/base.yaml"),
    ],
    ids=[
        "the task's own code",
        "a file beside it that judges",
        "what the code imports",
        "what the code reads",
        "an include",
    ],
)
def test_all_that_makes_a_prompt_or_a_score_counts(
    project: Project, monkeypatch: pytest.MonkeyPatch, file: str, text: str, keys: str
) -> None:
    monkeypatch.syspath_prepend(str(project.root))
    write_lines(Path("data/test.jsonl"), CASES)
    Path("data/phrases.py").write_text("START = 'Hello'")
    Path("data/text").write_text("What")
    Path("data/base.yaml").write_text('description: "Or not"')
    Path("tasks/right.txt").write_text("yes")
    Path("tasks/code.py").write_text(CODE)
    task = TASK | {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data/test.jsonl"}}}
    task.pop(keys.partition(":")[0], None)
    lines = [f"{key}: {json.dumps(value)}" for key, value in task.items()]
    Path("tasks/mine.yaml").write_text("\n".join([*lines, keys]))
    check_asked_anew(project, Path(file), lambda: Path(file).write_text(text) and None)
    assert not list(Path().rglob("*.pyc")), "Python would take an edit of the same second and size for the old code"


def test_a_clone_elsewhere_has_the_same_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a fresh clone would ask everything again, and the gate of a pull request would never pass."""
    digests = set()
    for name in ("here", "there"):
        root = tmp_path / name
        (root / "tasks").mkdir(parents=True)
        monkeypatch.chdir(root)
        write_lines(Path("tasks/test.jsonl"), CASES)
        Path("tasks/code.py").write_text(CODE)
        Path("tasks/right.txt").write_text("yes")
        files = {"data_files": {"test": "tasks/test.jsonl"}}
        task = json.dumps(TASK | {"dataset_path": "json", "dataset_kwargs": files}).removesuffix("}")
        Path("tasks/mine.yaml").write_text(task + ', "process_results": !function code.read_results}')
        digests.add(load_task("e", HarnessEval(kind="harness", task="mine", include_path="tasks")).digest)
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["data/none.jsonl", "data/none*.jsonl"])
def test_what_can_not_be_found_is_refused_by_name(project: Project, name: str) -> None:
    project.write_task(dataset_path="json", dataset_kwargs={"data_files": {"test": name}})
    with pytest.raises(SettingsError) as caught:
        project.watched()
    message = str(caught.value)
    assert message.startswith("products.agent.evals.e.task: lm-eval can't load 'mine': FileNotFoundError: ")
    assert name in message and "\n" not in message


def test_a_data_set_that_can_not_be_reached_is_refused_by_name(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # without a net it would try for half a minute
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    project.write_task(dataset_path="someone/cases")
    said = r"^products\.agent\.evals\.e\.task: lm-eval can't load 'mine': .*'someone/cases'"
    with pytest.raises(SettingsError, match=said):
        project.watched()


def test_only_what_lm_eval_s_own_thread_prints_is_kept_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Other evals work beside it, and say how far they are."""
    with ThreadPoolExecutor(1) as pool:
        with quiet():
            print("Processing 12 %", file=sys.stderr)
            pool.submit(print, "workflows: 3/9 cases", file=sys.stderr).result()
            pool.submit(lambda: print("said there", file=sys.stderr)).result()
        print("behind it", file=sys.stderr)
    assert capsys.readouterr().err == "workflows: 3/9 cases\nsaid there\nbehind it\n"


def test_a_data_set_of_the_hub_keeps_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cached by its commit; without the cache it could not be read offline."""
    import datasets

    folders: dict[str, str | None] = {}

    def note(path: str, cache_dir: str | None = None, **_: Any) -> None:
        folders[path] = cache_dir

    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    monkeypatch.setattr(datasets.load, "load_dataset_builder", note)
    with read_fresh():
        for path in ("someone/cases", "own", "csv"):
            datasets.load.load_dataset_builder(path, cache_dir=None)
        assert not datasets.is_caching_enabled()
    assert folders["someone/cases"] is None
    assert folders["own"] == folders["csv"] and not Path(str(folders["own"])).exists()
    assert datasets.load.load_dataset_builder is note and datasets.is_caching_enabled()
