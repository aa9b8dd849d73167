"""Sealing a user's evalset: the seal is right, nothing else changes, and evalsets/README.md tells the truth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from evalsets.seal import describe, main, seal
from pipeline.errors import EvalsetError
from pipeline.evalsets.cards import load_evalset
from pipeline.products.images.settings import ImagesEval
from pipeline.products.text.evals.tools import call_tool
from pipeline.products.text.evals.trajectories import is_completed
from pipeline.products.text.settings import EvalSettings
from pipeline.records.digests import digest_file
from tests.paths import ROOT

CARD = """\
# Our own notes
name: notes
version: "1.0"  # quoted, or it is a number
licence: CC0-1.0
kind: documents

# Who and how
made_by: hand
description: For tests.
cluster: a pair of notes
"""
CASES = [
    {"id": f"n{i}", "cluster": f"c{i // 2}", "buckets": ["zeta", "zeta"] if i else ["alpha"], "text": f"text {i}"}
    for i in range(3)
]


def write(folder: Path, card: str = CARD, cases: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(case) + "\n" for case in CASES) if cases is None else cases
    (folder / "cases.jsonl").write_text(text, encoding="utf-8")
    (folder / "card.yaml").write_text(card, encoding="utf-8")
    return folder


def refusal(folder: Path) -> str:
    """Return what sealing says, less the folder; the card stays as it was."""
    card = folder / "card.yaml"
    before = card.read_bytes() if card.is_file() else None
    with pytest.raises(EvalsetError) as caught:
        seal(folder)
    assert "\n" not in str(caught.value)
    assert before == (card.read_bytes() if card.is_file() else None)
    return str(caught.value).removeprefix(f"{folder}/")


def test_a_card_gets_its_seal_and_loads(tmp_path: Path) -> None:
    folder = write(tmp_path / "e")
    card = seal(folder)
    assert (folder / "card.yaml").read_text() == CARD + (
        f"num_cases: 3\nsha256: {digest_file(folder / 'cases.jsonl')}\nnum_clusters: 2\n"
        "buckets:\n  alpha: 1\n  zeta: 2\n"
    )  # a case is in a bucket once
    assert load_evalset(folder).card == card
    assert describe(card) == "notes: 3 cases, 2 clusters, buckets alpha 1, zeta 2; card sealed"


SEALED = """\
# top
num_cases: 9  # counted
name: notes
version: "1.0"
sha256: old
buckets:{old}
# between the buckets and the next key
licence: CC0-1.0
num_clusters: 9
kind: documents
made_by: hand
description: For tests.
cluster: a pair of notes
# end
"""
BUCKETS = {
    "kept": "\n  alpha: 7  # hot\n  zeta: 7",
    "gone": "\n  alpha: 7  # hot\n  zulu: 7",
    "flow": " {{alpha: 7}}",
    "none": " {{}}",
}


@pytest.mark.parametrize("old", BUCKETS)
@pytest.mark.parametrize("new", ["some", "none"])
def test_a_stale_seal_is_replaced_where_it_stood(tmp_path: Path, old: str, new: str) -> None:
    """ruamel.yaml hangs the comment after the buckets on the last of them: replacing them would lose it."""
    before = SEALED.format(old=BUCKETS[old].format())
    cases = "".join(json.dumps(case if new == "some" else case | {"buckets": []}) + "\n" for case in CASES)
    folder = write(tmp_path / "e", before, cases)
    seal(folder)
    hot = "  # hot" if old in ("kept", "gone") else ""
    buckets = f"\n  alpha: 1{hot}\n  zeta: 2" if new == "some" else " {}"
    after = SEALED.format(old=buckets).replace("9", "3", 1).replace("9", "2", 1)
    assert (folder / "card.yaml").read_text() == after.replace("old", digest_file(folder / "cases.jsonl"))
    load_evalset(folder)


@pytest.mark.parametrize("name", ["workflows", "tool_calls", "prose", "choices", "calibration"])
def test_sealing_twice_changes_nothing(tmp_path: Path, name: str) -> None:
    card = (ROOT / "evalsets" / name / "card.yaml").read_text(encoding="utf-8")
    folder = write(tmp_path / name, card, (ROOT / "evalsets" / name / "cases.jsonl").read_text(encoding="utf-8"))
    seal(folder)
    assert (folder / "card.yaml").read_text(encoding="utf-8") == card


def test_the_file_of_cases_in_place_of_its_folder_is_said(tmp_path: Path) -> None:
    """It was the system's word alone: not a directory."""
    (tmp_path / "cases.jsonl").write_text("")
    with pytest.raises(EvalsetError, match=r"cases\.jsonl: expected an evalset folder, got a file; name the folder"):
        seal(tmp_path / "cases.jsonl")


def test_what_can_not_be_sealed_is_said_and_the_card_stays(tmp_path: Path) -> None:
    broken = json.dumps(CASES[0]) + '\n{"id": "n9", "cluster": "c"}\n'
    assert refusal(write(tmp_path / "a", cases=broken)).startswith("cases.jsonl:2: text: expected this key, found none")
    assert refusal(write(tmp_path / "b", cases="")) == "cases.jsonl: expected at least one case, found none"
    unfinished = write(tmp_path / "c", "kind: trajectories\nname: notes\nversion: 1.0\nlicense: CC0-1.0\n")
    assert refusal(unfinished) == (
        "card.yaml: expected licence, description, made_by, cluster, tools, found none; unknown license, remove or "
        "correct the spelling; version: expected text, got 1.0"
    )
    folder = write(tmp_path / "d")
    (folder / "card.yaml").unlink()
    assert refusal(folder) == (
        "card.yaml: expected an evalset card, found no file; write one with name, version, licence, kind, description, "
        f"made_by, cluster, and for trajectories tools, then run `python -m evalsets.seal {folder}`"
    )
    (folder / "card.yaml").mkdir()
    with pytest.raises(EvalsetError, match="card.yaml"):  # as an OSError it would tell the user to run `dvc repro`
        main([str(folder)])


def test_the_command_prints_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "e")

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "evalsets.seal", *argv], cwd=ROOT, capture_output=True, text=True)

    sealed, refused, asked = run(str(folder)), run(), run("--help")
    assert (sealed.returncode, sealed.stderr) == (0, "")
    assert sealed.stdout == "notes: 3 cases, 2 clusters, buckets alpha 1, zeta 2; card sealed\n"
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "quantgate seal: expected one evalset folder, got []; usage: python -m evalsets.seal FOLDER\n"
    )
    assert asked.returncode == 1 and "usage: python -m evalsets.seal FOLDER" in asked.stderr


# The examples of evalsets/README.md.

README = (ROOT / "evalsets/README.md").read_text(encoding="utf-8")


def read_evals(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of the evals of the only product."""
    (product,) = params["products"].values()
    return list(product["evals"].values())


EXAMPLE = re.compile(r"^`([\w./-]+)`\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = {section.split("\n")[0]: dict(EXAMPLE.findall(section)) for section in re.split(r"^## ", README, flags=re.M)}
KINDS = ["documents", "choices", "answers", "tool_calls", "trajectories", "prompts"]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """One kind's files of the README, sealed; the current folder is their project. Returns the evalset's folder."""
    monkeypatch.chdir(tmp_path)
    files = SECTIONS[request.param]
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    folder = Path(next(name for name in files if name.endswith("card.yaml"))).parent
    seal(folder)
    return folder


@pytest.mark.parametrize(("example", "kind"), [(kind, kind) for kind in KINDS], indirect=["example"])
def test_each_example_seals_loads_and_is_an_eval(example: Path, kind: str) -> None:
    assert load_evalset(example).card.kind == kind
    params = YAML(typ="safe").load(Path("params.yaml"))
    (settings,) = read_evals(params)
    checked = TypeAdapter(EvalSettings | ImagesEval).validate_python(settings)
    assert str(example) in (getattr(checked, "evalset", None), getattr(checked, "include_path", None))


def test_the_command_of_the_readme_is_that_of_an_example() -> None:
    (folder,) = re.findall(r"^python -m evalsets\.seal (\S+)$", README, re.MULTILINE)
    assert f"{folder}/card.yaml" in SECTIONS["documents"]


@pytest.mark.parametrize("example", ["trajectories"], indirect=True)
def test_the_example_workflow_can_be_completed(example: Path) -> None:
    evalset = load_evalset(example)
    (case,) = evalset.cases
    state, result = call_tool(evalset.card.tools, case.state, "order", {"item": "lamp", "n": 2})
    assert result == {"left": 3} and is_completed(case, state)
    assert call_tool(evalset.card.tools, state, "order", {"item": "lamp", "n": 9})[1] == {"error": "not enough"}


def load_example_task(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """Return the task and its only document, as lm-eval reads them."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("cache"))
    (settings,) = read_evals(YAML(typ="safe").load(Path("params.yaml")))
    manager = TaskManager(include_path=settings["include_path"], include_defaults=False)
    task = manager.load([settings["task"]])["tasks"][settings["task"]]
    (document,) = task.test_docs()
    return task, document


@pytest.mark.parametrize("example", ["choices"], indirect=True)
def test_lm_eval_reads_the_example_task(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, document = load_example_task(monkeypatch)
    assert task.doc_to_text(document) == "Q: Which of these floats?\nA:"
    assert task.doc_to_choice(document)[task.doc_to_target(document)] == "a cork"


@pytest.mark.parametrize("example", ["answers"], indirect=True)
def test_a_blank_before_an_answer_is_no_mistake_in_the_example_task(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's first suite was refused with 0 of 200 right: most models write the blank, and cases don't."""
    task, document = load_example_task(monkeypatch)
    task.build_all_requests(limit=1)
    (request,) = task.instances
    request.resps.append(" at six")
    task.apply_filters()
    assert task.process_results(document, [request.filtered_resps["stripped"]]) == {"exact_match": 1.0}


def test_answers_that_are_never_right_are_told_and_sealed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case that the reference can't answer either shows no loss, and nobody sees why."""
    asked = [("a", "one"), ("b", "two "), ("a", "three"), ("c", "\tfour"), ("d", "five"), ("d", "five!")]
    cases = [{"id": f"q{i}", "cluster": f"q{i}", "question": q, "answer": a} for i, (q, a) in enumerate(asked)]
    text = "".join(json.dumps(case) + "\n" for case in cases)
    folder = write(tmp_path / "e", CARD.replace("kind: documents", "kind: answers"), text)
    assert main([str(folder)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("notes: 6 cases") and load_evalset(folder).card.num_cases == 6
    assert said.err.splitlines() == [
        f"warning: {folder}/cases.jsonl:2: answer begins or ends with blanks; no answer equals it once a task has "
        "stripped that (likewise 1 more)",
        f"warning: {folder}/cases.jsonl:3: a question that stands above with another answer; one of both is always "
        "wrong (likewise 1 more)",
    ]


def test_a_key_that_is_misspelt_is_named(tmp_path: Path) -> None:
    case = json.dumps({"id": "q", "cluster": "q", "question": "a", "anwser": "b"})
    said = refusal(write(tmp_path / "e", CARD.replace("kind: documents", "kind: answers"), f"{case}\n"))
    assert said.endswith("answer: expected this key, found none; 'anwser' is there: correct its spelling")
