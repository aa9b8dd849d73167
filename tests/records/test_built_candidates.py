"""What was built is read back only for the candidate and the steps that params.yaml names now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvidenceError
from pipeline.products.vision.serving import read_network_candidate, serve
from pipeline.records.built_candidates import read_built
from pipeline.records.evaluations import BuiltCandidate, Checkpoint
from pipeline.records.record_files import write_record
from tests.fakes.tiny_networks import make_detector

CHECKPOINT = Checkpoint(
    path="m", kind="detector", format="dense", dtype="float32", num_parameters=1, num_bytes=4, digest="d"
)
HALF: dict[str, Any] = {"kind": "precision", "dtype": "float16", "autocast": False}


def write(build: Path, name: str, steps: list[dict[str, Any]], *, within: str | None = None) -> None:
    built = BuiltCandidate(name=within or name, checkpoint=CHECKPOINT, steps=tuple(steps))
    write_record(build / "candidates" / name / "candidate.json", built)


def test_what_a_record_adds_to_a_step_does_not_matter(tmp_path: Path) -> None:
    write(tmp_path, "a", [HALF | {"serving": {"dtype": "float16"}}])
    assert read_built(tmp_path, "a", [HALF]).steps[0]["serving"] == {"dtype": "float16"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "expected steps [], as params.yaml asks, got ['precision']"),
        ([HALF, {"kind": "channels_last"}], "expected steps ['precision', 'channels_last'], as params.yaml asks"),
        ([{"kind": "compile"}], "expected steps ['compile']"),
        ([HALF | {"dtype": "bfloat16"}], "steps.0.dtype: expected 'bfloat16', as params.yaml asks, got 'float16'"),
        ([HALF | {"more": 1}], "steps.0.more: expected 1, as params.yaml asks, got None"),
    ],
)
def test_other_steps_are_refused_by_their_path(tmp_path: Path, asked: list[dict[str, Any]], said: str) -> None:
    """A candidate judged with the steps of yesterday would ship under the name of today's."""
    write(tmp_path, "a", [HALF])
    with pytest.raises(EvidenceError) as caught:
        read_built(tmp_path, "a", asked)
    assert said in str(caught.value) and str(caught.value).endswith("run `dvc repro`")


def test_another_candidates_record_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a", [], within="b")
    with pytest.raises(EvidenceError, match="expected candidate 'a', found 'b'; run `dvc repro`"):
        read_built(tmp_path, "a", [])
    with pytest.raises(EvidenceError, match="expected a BuiltCandidate, found no file"):
        read_built(tmp_path, "c", [])


def test_serving_is_what_all_share_and_what_the_steps_changed(tmp_path: Path) -> None:
    """Another batch size must reach every candidate without building it again."""
    steps = [HALF, {"kind": "channels_last"}]
    product = make_detector({"a": steps})
    write(
        tmp_path,
        "a",
        [
            HALF | {"serving": {"dtype": "float16", "autocast": False}},
            {"kind": "channels_last", "serving": {"channels_last": True}},
        ],
    )
    found = read_network_candidate(tmp_path, "a", product).serving
    assert (found.dtype, found.channels_last, found.batch_size, found.num_threads) == ("float16", True, 4, 1)
    wider = product.model_copy(update={"serving": product.serving.model_copy(update={"batch_size": 9})})
    again = read_network_candidate(tmp_path, "a", wider)
    assert again.serving.batch_size == 9
    assert again.fingerprint != read_network_candidate(tmp_path, "a", product).fingerprint
    assert serve(BuiltCandidate(name="a", checkpoint=CHECKPOINT), product).serving.summary == "torch float32"
