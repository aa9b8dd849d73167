"""Shards of an evaluation: who holds what, and a merge that takes nothing over which is not the one whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvidenceError, SettingsError
from pipeline.records.evaluations import CaseRecord
from pipeline.records.fingerprints import fingerprint
from pipeline.running.journal import Journal
from pipeline.running.shards import AttemptFolder, Shard, choose_batches, find_shards, parse_shard

FACTS = {"checkpoint": {"digest": "a" * 64}, "serving": {"dtype": "float32"}, "hardware": {"device": "cpu", "cpu": "a"}}
CLUSTERS = [f"cluster-{i}" for i in range(40)]
KEY, EVAL, NAME = "key", "calls", "model"


def make_record(cluster: str, **changes: Any) -> CaseRecord:
    given = {"case_id": cluster, "input_digest": cluster, "cluster": cluster, "prompt": "?", "output": "yes"}
    return CaseRecord.model_validate(given | {"fingerprint": fingerprint(FACTS), "scores": {"exact": 1.0}} | changes)


def run_shard(
    build: Path, shard: Shard, facts: Any = FACTS, key: str = KEY, *, is_finished: bool = True, **changes: Any
) -> Path:
    """Answer the cases of a shard; return the attempt's folder."""
    attempt = AttemptFolder(build, NAME, shard)
    with attempt.open_journal(EVAL, facts, key=key) as journal:
        for cluster in filter(shard.holds, CLUSTERS):
            if journal.find(cluster) is None:
                journal.add(cluster, make_record(cluster, **changes))
        journal.add_text(f"notes of {shard}", json.dumps({"seconds": id(attempt)}), is_measured=True)
    if is_finished:
        attempt.finish()
    return attempt.path


def merge(build: Path, facts: Any = FACTS, key: str = KEY) -> list[str]:
    """Return the cases that a merge gives."""
    shards = find_shards(build, NAME)
    assert shards is not None
    with Journal(build / "whole.jsonl", fingerprint=fingerprint(facts), key=key) as journal:
        shards.merge(EVAL, facts, key=key, journal=journal)
        return [cluster for cluster in CLUSTERS if journal.find(cluster)]


@pytest.fixture
def build(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        run_shard(tmp_path, Shard(number, 3))
    return tmp_path


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "-1/3", "1/3/3", "a/b", "1.5/3", "1 / 3"])
def test_a_shard_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(SettingsError, match="^--shard: expected a number and how many there are"):
        parse_shard(text)


def test_a_shard_is_read_as_it_is_written() -> None:
    assert parse_shard("3/8") == Shard(3, 8) and str(Shard(3, 8)) == "3/8"


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_each_cluster_belongs_to_one_shard(count: int) -> None:
    shards = [Shard(number, count) for number in range(1, count + 1)]
    assert all(sum(shard.holds(cluster) for shard in shards) == 1 for cluster in CLUSTERS)
    assert count == 1 or sum(map(shards[0].holds, CLUSTERS)) < len(CLUSTERS)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_batches_that_share_a_cluster_stay_together(count: int) -> None:
    batches = [["a", "b"], ["c"], ["b", "d"], ["e", "f"], ["d", "g"], ["h"]]
    shards = [choose_batches(batches, Shard(number, count), lambda batch: batch) for number in range(1, count + 1)]
    assert sorted(batch for held in shards for batch in held) == sorted(batches)
    (home,) = [held for held in shards if ["a", "b"] in held]
    assert [batch for batch in home if set("abdg") & set(batch)] == [["a", "b"], ["b", "d"], ["d", "g"]]


def test_all_shards_make_one_whole(build: Path) -> None:
    assert merge(build) == CLUSTERS
    counts = find_shards(build, NAME)
    assert counts is not None and counts.counts.model_dump() == {
        "num_shards": 3,
        "num_attempts": 3,
        "num_unfinished": 0,
        "num_hosts": 1,
    }


def test_without_shards_there_is_nothing_to_take_over(tmp_path: Path) -> None:
    assert find_shards(tmp_path, NAME) is None


def test_a_shard_run_twice_changes_nothing_but_its_times(build: Path) -> None:
    shutil.rmtree(build / "shards" / NAME / "2-of-3")
    run_shard(build, Shard(2, 3), latency_s=1.0)
    first = (build / "shards" / NAME / "2-of-3").rename(build / "first")
    run_shard(build, Shard(2, 3), latency_s=2.0)
    shutil.copytree(first, build / "shards" / NAME / "2-of-3", dirs_exist_ok=True)
    assert merge(build) == CLUSTERS


def test_an_attempt_goes_on_where_one_that_ended_stopped(build: Path) -> None:
    shutil.rmtree(build / "shards" / NAME / "2-of-3")
    stopped = run_shard(build, Shard(2, 3), is_finished=False, output="first")
    with (stopped / f"{EVAL}.jsonl").open("ab") as file:
        file.write(b'{"key": "torn')
    again = run_shard(build, Shard(2, 3), output="second")
    assert b'"second"' not in (again / f"{EVAL}.jsonl").read_bytes()


def test_an_attempt_that_was_killed_before_its_first_entry_changes_nothing(build: Path) -> None:
    """Its index comes first: a node that dies just then left a whole that could not be merged, all work done."""
    killed = run_shard(build, Shard(2, 3), is_finished=False)
    index = json.loads((killed / "attempt.json").read_text())
    index["evals"][EVAL] = {"key": KEY}
    (killed / "attempt.json").write_text(json.dumps(index))
    (killed / f"{EVAL}.jsonl").unlink()
    assert merge(build) == CLUSTERS


def test_a_damaged_shard_is_refused_before_anything_starts(build: Path) -> None:
    """A server was started and warm when the stage found it."""
    _cut_file(build / "shards" / NAME)
    with pytest.raises(EvidenceError, match="entries as its attempt wrote them, got another file"):
        find_shards(build, NAME)


def _drop_folder(home: Path) -> None:
    shutil.rmtree(home / "2-of-3")


def _drop_file(home: Path) -> None:
    next(home.glob(f"2-of-3/*/{EVAL}.jsonl")).unlink()


def _cut_file(home: Path) -> None:
    path = next(home.glob(f"2-of-3/*/{EVAL}.jsonl"))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))


def _stop_early(home: Path) -> None:
    _drop_folder(home)
    run_shard(home.parents[1], Shard(2, 3), is_finished=False)


def _mix_counts(home: Path) -> None:
    run_shard(home.parents[1], Shard(1, 2))


def _change_answer(home: Path) -> None:
    shutil.move(home / "2-of-3", home.parents[1] / "first")
    run_shard(home.parents[1], Shard(2, 3), output="no")
    shutil.copytree(home.parents[1] / "first", home / "2-of-3", dirs_exist_ok=True)


def _use_other_device(home: Path) -> None:
    _drop_folder(home)
    run_shard(home.parents[1], Shard(2, 3), facts=FACTS | {"hardware": {"device": "NVIDIA H100", "cpu": "a"}})


def _use_other_weights(home: Path) -> None:
    _drop_folder(home)
    run_shard(home.parents[1], Shard(2, 3), facts=FACTS | {"checkpoint": {"digest": "b" * 64}})


def _use_other_code(home: Path) -> None:
    _drop_folder(home)
    run_shard(home.parents[1], Shard(2, 3), key="of an older version")


def _take_another_candidate(home: Path) -> None:
    path = next(home.glob("2-of-3/*/attempt.json"))
    path.write_text(path.read_text().replace(f'"{NAME}"', '"other"'))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_drop_folder, r"expected 3 finished shards, found 2; missing: 2; run `.* --shard 2/3`, or remove the folder"),
        (_stop_early, r"expected 3 finished shards, found 2; missing: 2"),
        (_drop_file, r"2-of-3/.*/calls\.jsonl: expected finished cases, found no file"),
        (_cut_file, r"2-of-3/.*/calls\.jsonl: expected \d+ entries as its attempt wrote them, got another file"),
        (_mix_counts, r"expected shards of one whole, found some of 2 and some of 3"),
        (_change_answer, r"case 'cluster-\d+': expected the answer of .*2-of-3/.*, got another"),
        (_use_other_device, r"2-of-3/.*: expected hardware.device 'cpu', got 'NVIDIA H100' on "),
        (_use_other_weights, r"2-of-3/.*: expected checkpoint digest .* 'aaaaaaaaaaaa', got 'bbbbbbbbbbbb' on "),
        (_use_other_code, r"2-of-3/.*: expected the settings, cases and code of now, this attempt had others"),
        (_take_another_candidate, r"2-of-3/.*: expected shards of 'model', found 'other'"),
    ],
)
def test_what_is_not_one_whole_is_refused_by_name(build: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(build / "shards" / NAME)
    with pytest.raises(EvidenceError, match=said) as caught:
        merge(build)
    assert "\n" not in str(caught.value)


def test_a_whole_of_other_settings_is_refused(build: Path) -> None:
    with pytest.raises(EvidenceError, match="expected the settings, cases and code of now"):
        merge(build, key="newer")


@pytest.mark.parametrize("spoil", [_drop_file, _cut_file])
def test_a_shard_that_is_damaged_while_a_server_starts_is_refused(build: Path, spoil: Callable[[Path], None]) -> None:
    """Minutes lie between the look at the shards and their merge; a digest takes a fiftieth of the merge's time."""
    found = find_shards(build, NAME)
    assert found is not None
    spoil(build / "shards" / NAME)
    with (
        Journal(build / "whole.jsonl", fingerprint=fingerprint(FACTS), key=KEY) as journal,
        pytest.raises(EvidenceError, match=r"2-of-3/.*/calls\.jsonl: expected "),
    ):
        found.merge(EVAL, FACTS, key=KEY, journal=journal)
