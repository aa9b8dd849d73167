"""What was made ahead of a stage: taken over where it is of these very inputs, whole, and DVC asks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import JournalError
from pipeline.products.params import load_params
from pipeline.running import prefetched
from pipeline.running.journal import lock_candidate
from pipeline.running.prefetched import DVC_STAGE, Work, digest_inputs_now, keep, put_back, take_over
from pipeline.running.stage_code import digest_code
from pipeline.settings.base import Product
from tests.paths import ROOT

NAME = "people-again"


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def write_inputs(steps: str = "1", code: str | None = None) -> None:
    entry = {stage: {NAME: {"steps": steps, "code": code or digest_code(stage, "vision")}} for stage in STAGES}
    write("build/env/inputs.json", json.dumps(entry))


STAGES = {"optimize": "candidates", "evaluate": "evaluations"}


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Product:
    """A product in a project where env has run, and a candidate has been made and evaluated."""
    loaded = load_params(ROOT / "params.yaml").products["people"]
    monkeypatch.chdir(tmp_path)
    write_inputs()
    write("build/env/libraries.json", '{"torch": "1"}')
    write("build/env/machine.json", '{"cpu": "x"}')
    for folder in STAGES.values():
        write(f"build/people/{folder}/{NAME}/record.json", folder)
        write(f"build/people/{folder}/{NAME}/weights/README.md", "a note is a file, too")
    return loaded


def make_ahead(product: Product, stage: str) -> Work:
    work = Work(stage, NAME, product)
    keep(work, digest_inputs_now(work))
    return work


def clear(work: Work) -> None:
    """Do what DVC does ahead of a stage."""
    shutil.rmtree(work.target)


def list_files(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_dvc_runs_takes_over_what_was_made_of_its_inputs(
    product: Product, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    work = make_ahead(product, stage)
    before = list_files(work.target)
    clear(work)
    monkeypatch.setenv(DVC_STAGE, f"{stage}@{NAME}")
    assert take_over(stage, NAME, product)
    assert list_files(work.target) == before and len(before) == 2
    assert not work.seal.exists() and not work.folder.exists()
    assert not take_over(stage, NAME, product), "it is there once"


def test_a_stage_that_is_run_by_hand_makes_everything_itself(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage env may not have run since the last edit, and then the digests are those of before."""
    work = make_ahead(product, "optimize")
    monkeypatch.delenv(DVC_STAGE, raising=False)
    assert not take_over("optimize", NAME, product)
    monkeypatch.setenv(DVC_STAGE, "optimize@people")
    assert not take_over("optimize", NAME, product)
    assert work.seal.is_file()


def edit_settings(_: Work) -> None:
    write_inputs(steps="2")


def edit_code(_: Work) -> None:
    write_inputs(code="of another day")


def change_library(_: Work) -> None:
    write("build/env/libraries.json", '{"torch": "2"}')


def change_machine(_: Work) -> None:
    write("build/env/machine.json", '{"cpu": "y"}')


def change_candidate(_: Work) -> None:
    Path(f"build/people/candidates/{NAME}/record.json").unlink()  # it shares its bytes with what is kept
    write(f"build/people/candidates/{NAME}/record.json", "another")


def change_file(work: Work) -> None:
    path = work.folder / "record.json"
    path.unlink()
    path.write_text("another")


def lose_file(work: Work) -> None:
    (work.folder / "weights/README.md").unlink()


def add_file(work: Work) -> None:
    (work.folder / "more.json").write_text("{}")


def cut_seal(work: Work) -> None:
    work.seal.write_text(work.seal.read_text()[:20])


@pytest.mark.parametrize(
    "change",
    [
        edit_settings,
        edit_code,
        change_library,
        change_machine,
        change_candidate,
        change_file,
        lose_file,
        add_file,
        cut_seal,
    ],
)
def test_of_other_inputs_or_damaged_it_is_not_taken_over(
    product: Product, monkeypatch: pytest.MonkeyPatch, change: Callable[[Work], None]
) -> None:
    """The gate would judge what nobody would ship."""
    work = make_ahead(product, "evaluate")
    clear(work)
    change(work)
    monkeypatch.setenv(DVC_STAGE, f"evaluate@{NAME}")
    assert not take_over("evaluate", NAME, product)
    assert not work.target.exists()
    assert not work.seal.exists() and not work.folder.exists(), "what the stage makes takes its place"


def test_a_variable_that_can_change_an_answer_counts(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_ahead(product, "evaluate")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert not put_back(work, digest_inputs_now(work))


def test_what_was_not_kept_to_the_end_is_not_there(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the files and their digests."""
    work = make_ahead(product, "optimize")
    monkeypatch.setattr(prefetched, "write_record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        keep(work, digest_inputs_now(work))
    assert not put_back(work, digest_inputs_now(work))


def test_the_next_prefetch_finds_what_this_one_made(product: Product) -> None:
    """Also where DVC has removed it from its place, or another version lies there."""
    work = make_ahead(product, "optimize")
    before = list_files(work.target)
    clear(work)
    assert put_back(work, digest_inputs_now(work)) and list_files(work.target) == before
    change_candidate(work)
    assert put_back(work, digest_inputs_now(work)) and list_files(work.target) == before
    assert work.seal.is_file()


def test_code_that_env_has_not_seen_has_no_inputs(product: Product) -> None:
    write_inputs(code="of another day")
    work = Work("optimize", NAME, product)
    assert digest_inputs_now(work) == ""
    keep(work, "")
    assert not put_back(work, "")


def test_a_candidate_that_another_process_works_on_is_refused(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ahead(product, "optimize")
    monkeypatch.setenv(DVC_STAGE, f"optimize@{NAME}")
    with lock_candidate(product.build, NAME), pytest.raises(JournalError, match="one process to work on"):
        take_over("optimize", NAME, product)
