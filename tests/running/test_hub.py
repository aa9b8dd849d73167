"""A pinned model is downloaded once, and whatever stops that is one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import CheckpointError, EvidenceError
from pipeline.gate.checks import locate_judged
from pipeline.records.digests import digest_checkpoint
from pipeline.running.hub import locate_checkpoint
from pipeline.settings.hub_names import find_unpinned, parse_pinned
from tests.fakes.fake_hub import REFERENCE, REPOSITORY, REVISION, FakeHub, serve_hub

FILES = {
    "config.json": "{}",
    "model-00001-of-00002.safetensors": "one" * 1000,
    "model-00002-of-00002.safetensors": "two" * 1000,
    "model.safetensors.index.json": "{}",
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
}
OTHERS = ("pytorch_model.bin", "modeling_tiny.py", "README.md", "consolidated.safetensors", "original/params.json")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "model"
    for name, text in FILES.items() | dict.fromkeys(OTHERS, "other").items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with serve_hub(folder, tmp_path / "cache") as hub:
        yield hub


def test_a_folder_is_one_of_the_project(tmp_path: Path) -> None:
    """It asks nobody."""
    assert locate_checkpoint("models/agent", tmp_path) == tmp_path / "models/agent"


def test_a_pinned_model_is_downloaded_once(hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = locate_checkpoint(REFERENCE, tmp_path)
    assert capfd.readouterr().err == f"downloading {REFERENCE} from {hub.url} to {tmp_path / 'cache'}\n"
    assert {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()} == FILES
    hub.requests.clear()
    assert locate_checkpoint(REFERENCE, tmp_path) == folder
    assert hub.requests == [] and capfd.readouterr().err == ""


def test_neither_pickles_nor_code_are_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    locate_checkpoint(REFERENCE, tmp_path)
    assert hub.requests and not [r for r in hub.requests for name in OTHERS if r.endswith(f"/{name}")]


def test_a_cut_download_goes_on_where_it_stopped(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there already is not downloaded again, and the half file does not count as there."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's own attempts
    hub.cut = "model-00002-of-00002.safetensors"
    with pytest.raises(CheckpointError, match="check the network"):
        locate_checkpoint(REFERENCE, tmp_path)
    hub.cut = None
    hub.requests.clear()
    folder = locate_checkpoint(REFERENCE, tmp_path)
    assert {p.name: p.read_text() for p in folder.iterdir()} == FILES
    downloaded = {r.rpartition("/")[2] for r in hub.requests if r.startswith("GET")}
    assert "model-00002-of-00002.safetensors" in downloaded and "config.json" not in downloaded


def test_a_file_missing_from_the_cache_is_downloaded_again(hub: FakeHub, tmp_path: Path) -> None:
    folder = locate_checkpoint(REFERENCE, tmp_path)
    (folder / "chat_template.jinja").resolve().unlink()
    assert (locate_checkpoint(REFERENCE, tmp_path) / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_folder_that_another_program_began_is_completed(hub: FakeHub, tmp_path: Path) -> None:
    """Transformers downloads one file at a time, and keeps no list of what there is."""
    from huggingface_hub import hf_hub_download

    hf_hub_download(REPOSITORY, "config.json", revision=REVISION)
    assert {p.name for p in locate_checkpoint(REFERENCE, tmp_path).iterdir()} == FILES.keys()


def test_files_that_another_program_adds_are_no_part_of_it(hub: FakeHub, tmp_path: Path) -> None:
    """Else the digest would depend on who downloaded what before, and the gate would see a change."""
    from huggingface_hub import hf_hub_download

    folder = locate_checkpoint(REFERENCE, tmp_path)
    before = digest_checkpoint(folder)
    for name in OTHERS:
        hf_hub_download(REPOSITORY, name, revision=REVISION)
    assert digest_checkpoint(locate_checkpoint(REFERENCE, tmp_path)) == before


def test_links_follow_the_cache(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another HF_HOME: the folder must not go on to name files that may be gone."""
    from huggingface_hub import constants

    folder = locate_checkpoint(REFERENCE, tmp_path)
    (tmp_path / "cache").rename(tmp_path / "moved")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "moved"))
    hub.requests.clear()
    assert locate_checkpoint(REFERENCE, tmp_path) == folder and hub.requests == []
    assert {p.name: p.read_text() for p in folder.iterdir()} == FILES


@pytest.mark.parametrize(
    ("status", "reason", "remedy"),
    [
        (401, "RepoNotFound", "there is none of that name, or it is private: correct the name, or set HF_TOKEN"),
        (401, "GatedRepo", "its owner asks to accept conditions: do so on its page, and set HF_TOKEN"),
        (403, "GatedRepo", "its owner asks to accept conditions: do so on its page, and set HF_TOKEN"),
        (403, "Forbidden", "the hub refused with HTTP 403: set HF_TOKEN to one that may read it"),
        (404, "RepoNotFound", "there is none of that name, or it is private"),
        (404, "RevisionNotFound", "it has no such commit: copy one from its history"),
    ],
)
@pytest.mark.parametrize("refused", ["", "/resolve/"])
def test_a_refusal_is_one_line(
    hub: FakeHub, tmp_path: Path, status: int, reason: str, remedy: str, refused: str
) -> None:
    """Of a gated model everybody may list the files."""
    hub.refusal, hub.refused = (status, reason), refused
    with pytest.raises(CheckpointError) as caught:
        locate_checkpoint(REFERENCE, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{REFERENCE}: expected the model at {hub.url}, ") and "\n" not in message
    assert str(tmp_path / "cache") in message and remedy in message


def test_a_hub_that_is_gone_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    hub.stop()
    with pytest.raises(CheckpointError) as caught:
        locate_checkpoint(REFERENCE, tmp_path)
    assert "check the network and HF_ENDPOINT" in str(caught.value) and "\n" not in str(caught.value)


def test_judging_downloads_nothing(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="run `dvc repro`, whose stage env downloads it"):
        locate_judged(REFERENCE, tmp_path)
    assert hub.requests == []
    folder = locate_checkpoint(REFERENCE, tmp_path)
    assert locate_judged(REFERENCE, tmp_path) == folder


def test_offline_asks_nobody(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model in the cache nothing is missing; without it one line says which variable forbids the download."""
    from huggingface_hub import close_session, constants

    folder = locate_checkpoint(REFERENCE, tmp_path)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    assert locate_checkpoint(REFERENCE, tmp_path) == folder
    (folder / "tokenizer.json").resolve().unlink()
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"):
        locate_checkpoint(REFERENCE, tmp_path)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"):
        locate_checkpoint(REFERENCE.replace("tiny", "other"), tmp_path)
    assert hub.requests == []
    close_session()


@pytest.mark.parametrize(
    "reference",
    [
        f"hf://{REPOSITORY}",
        f"hf://{REPOSITORY}@main",
        f"hf://{REPOSITORY}@{REVISION[:12]}",
        f"hf://tiny@{REVISION}",
        f"hf://{REPOSITORY}@{REVISION.upper()}",
        f"hf://{REPOSITORY}/sub@{REVISION}",
        f"hf://a/b--c@{REVISION}",
        f"hf://a/b..c@{REVISION}",
        f"hf://a/b.@{REVISION}",
        "hf://",
    ],
)
def test_a_model_without_its_commit_is_refused(reference: str) -> None:
    assert parse_pinned(reference) is None
    problem = find_unpinned(reference)
    assert problem and "40 hex digits of a commit" in problem and repr(reference) in problem


def test_a_pinned_model_and_a_folder_are_names() -> None:
    assert parse_pinned(REFERENCE) == (REPOSITORY, REVISION)
    assert find_unpinned(REFERENCE) is None and find_unpinned("models/agent") is None
