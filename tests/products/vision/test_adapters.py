"""A user's adapter: what runs is what is digested, and what goes wrong in it is one line with its line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from pipeline.errors import CheckpointError, EngineError
from pipeline.products.vision.adapters import load_adapter
from pipeline.products.vision.loading import list_tensors, to_float
from pipeline.products.vision.raw_outputs import find_finite
from pipeline.records.digests import digest_file
from tests.fakes.tiny_networks import DETECTOR

PLAIN = "def build(config):\n    return 1\n\n\ndef preprocess(pixels):\n    pass\n\n\ndef postprocess(*_):\n    pass\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "adapter.py"
    path.write_text(text)
    return path


def test_an_edit_within_the_same_second_is_what_runs(tmp_path: Path) -> None:
    """Python's bytecode is told apart by second and size: an old adapter ran under the digest of the new one."""
    path = write(tmp_path, PLAIN)
    assert load_adapter(path).build({}) == 1
    stamp = path.stat()
    write(tmp_path, PLAIN.replace("return 1", "return 7"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    adapter = load_adapter(path)
    assert adapter.build({}) == 7 and adapter.digest == digest_file(path)
    assert not list(tmp_path.rglob("__pycache__")), "it would lie in the checkpoint's folder"


def test_two_adapters_of_one_name_are_two(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = load_adapter(write(tmp_path, PLAIN))
    second = load_adapter(write(tmp_path / "other", PLAIN.replace("return 1", "return 9")))
    assert (first.build({}), second.build({})) == (1, 9) and first.digest != second.digest


def test_dataclasses_and_annotations_work_as_in_any_module(tmp_path: Path) -> None:
    """A dataclass looks its module up by name; with another file's `annotations` they would be text."""
    head = "from dataclasses import dataclass, fields\n\n\n@dataclass\nclass Size:\n    side: int = 3\n\n\n"
    adapter = load_adapter(write(tmp_path, head + PLAIN.replace("return 1", "return fields(Size())[0].type")))
    assert adapter.build({}) is int


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("def postprocess(outputs, config, size):\n    pass\n", True),
        ("def postprocess(outputs, config):\n    pass\n", False),
        ("postprocess = max\n", False),  # as compiled code, it tells no parameters
    ],
)
def test_the_size_is_given_where_it_is_a_parameter(tmp_path: Path, text: str, takes: bool) -> None:
    path = write(tmp_path, PLAIN[: PLAIN.index("def postprocess")] + text)
    assert load_adapter(path).takes_size == takes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            PLAIN.replace("def build", "def make"),
            "expected the functions build, preprocess, postprocess, found no build",
        ),
        (PLAIN + "build = 3\n", "found no build"),
        ("x = 1 / 0\n" + PLAIN, "can't be imported: ZeroDivisionError: division by zero (line 1)"),
        (PLAIN + "\n\ndef f(:\n", "can't be imported: SyntaxError: invalid syntax (line 13)"),
        ("raise ValueError\n", "can't be imported: ValueError: without a message (line 1)"),
        ("raise ValueError('a\\n' * 999)\n", "can't be imported: ValueError: a a a"),
        ("import sys\nsys.exit(0)\n", "can't be imported: SystemExit: 0 (line 2)"),
    ],
)
def test_an_adapter_that_can_not_be_used_says_why_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_adapter(write(tmp_path, text))
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_an_adapter_that_exits_is_told_as_any_other_error(tmp_path: Path) -> None:
    """The stage ended in silence with exit code 0, and a worker seemed to lack memory."""
    adapter = load_adapter(write(tmp_path, PLAIN.replace("return 1", "raise SystemExit('no such width')")))
    with pytest.raises(EngineError, match=r"build\(\) failed: SystemExit: no such width \(line 2\)"):
        adapter.build({})


def test_a_syntax_error_elsewhere_is_not_given_a_line_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line was that of the other file."""
    (tmp_path / "broken_neighbour.py").write_text("\n" * 40 + "def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match=r"broken_neighbour.py, line 41\) \(line 2\)$"):
        load_adapter(write(tmp_path, "\nimport broken_neighbour\n" + PLAIN))


def test_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected the adapter, a Python file with build, preprocess, postp"):
        load_adapter(tmp_path / "gone.py")


@pytest.mark.parametrize("is_relative", [True, False])
def test_an_error_names_the_deepest_line_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    """Stages give relative paths, and frames had absolute ones: no line was named."""
    monkeypatch.chdir(tmp_path)
    inner = "\n\ndef inner(config):\n    return config[0]\n"
    write(tmp_path, PLAIN.replace("return 1", "return inner(config)") + inner)
    adapter = load_adapter(Path("adapter.py") if is_relative else tmp_path / "adapter.py")
    with pytest.raises(EngineError, match=r"adapter.py: build\(\) failed: KeyError: 0 \(line 14\); correct the adapt"):
        adapter.build({})


@pytest.mark.parametrize("function", ["build", "preprocess", "postprocess"])
@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        ("torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')", torch.OutOfMemoryError),
        ("RuntimeError('CUDA error: unspecified launch failure')", RuntimeError),
        ("MemoryError", MemoryError),
    ],
    ids=["full", "dead", "host"],
)
def test_a_device_that_fails_is_not_the_adapters_error(
    tmp_path: Path, function: str, raised: str, kind: type[BaseException]
) -> None:
    """A full GPU was told as 'correct the adapter', and without the remedy, which is a smaller batch."""
    text = f"import torch\n{PLAIN}\n\ndef {function}(*_):\n    raise {raised}\n"
    adapter = load_adapter(write(tmp_path, text))
    with pytest.raises(kind) as caught:
        getattr(adapter, function)({})
    assert caught.type is kind


@pytest.mark.parametrize("kind", ["SystemExit", "ValueError"])
def test_an_adapter_that_catches_a_full_device_is_told_in_one_line(tmp_path: Path, kind: str) -> None:
    """Let through, the one ends a worker in silence, and the other is a traceback."""
    adapter = load_adapter(write(tmp_path, PLAIN.replace("return 1", f"raise {kind}('CUDA out of memory')")))
    with pytest.raises(EngineError, match=rf"build\(\) failed: {kind}: CUDA out of memory \(line 2\)"):
        adapter.build({})


def test_an_error_outside_of_the_adapter_has_its_calling_line(tmp_path: Path) -> None:
    adapter = load_adapter(write(tmp_path, "import json\n" + PLAIN.replace("return 1", "return json.loads('{')")))
    with pytest.raises(EngineError, match=r"build\(\) failed: JSONDecodeError: .* \(line 3\)"):
        adapter.build({})


def test_no_module_is_left_behind_under_a_users_name(tmp_path: Path) -> None:
    load_adapter(write(tmp_path, DETECTOR))
    assert "adapter" not in sys.modules


def test_labels_and_masks_stay_what_they_are() -> None:
    """As floats a mask picks nothing, and a label of 2^24 + 1 is another."""
    given = {
        "boxes": torch.ones(2, 4, dtype=torch.bfloat16),
        "labels": torch.tensor([2**24 + 1]),
        "keep": [torch.tensor([True])],
        "more": 3,
    }
    found = to_float(given)
    assert found["boxes"].dtype == torch.float32 and found["more"] == 3
    assert found["labels"].tolist() == [2**24 + 1] and found["keep"][0].dtype == torch.bool


NAN = float("nan")


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        pytest.param(torch.tensor([[1.0, NAN], [1, 2]]), [False, True], id="by-picture"),
        pytest.param(torch.tensor([1.0, NAN]), [True, False], id="one-number-a-picture"),
        pytest.param(
            [torch.zeros(2, 3), torch.tensor([[[1.0]], [[float("inf")]]])], [True, False], id="several-tensors"
        ),
        pytest.param(torch.tensor(NAN), [False, False], id="one-number"),
        pytest.param({"a": torch.tensor([1.0, 2, NAN])}, [False, False], id="another-length"),
        pytest.param(torch.zeros(2, 0, 4), [True, True], id="no-boxes"),
        pytest.param([torch.tensor([1, 2]), torch.tensor([True, False])], [True, True], id="no-fractions"),
        pytest.param([], [True, True], id="nothing"),
        pytest.param([torch.tensor([[1.0], [NAN]]), torch.zeros(3, 1)], [False, True], id="boxes-of-each-picture"),
        pytest.param(
            [{"boxes": torch.tensor([[1.0], [NAN]])}, {"boxes": torch.zeros(2, 1)}], [False, True], id="as-torchvision"
        ),
        pytest.param([torch.zeros(2, 3, 6), torch.tensor([[0.0], [1], [NAN]])], [False, False], id="with-anchors"),
    ],
)
def test_each_picture_is_finite_by_itself(tmp_path: Path, outputs: object, expected: list[bool]) -> None:
    adapter = load_adapter(write(tmp_path, PLAIN))
    assert find_finite(adapter, outputs, 2) == expected


@pytest.mark.parametrize("outputs", [[3.0], {"boxes": [[1.0]]}, object(), None])
def test_outputs_that_hide_their_numbers_are_no_proof_that_they_are_finite(tmp_path: Path, outputs: object) -> None:
    """A class of the user's own holds its tensors unseen, and every picture counted as finite."""
    adapter = load_adapter(write(tmp_path, PLAIN))
    assert list_tensors(outputs) == []
    with pytest.raises(EngineError, match="the module returned .* without a tensor in it"):
        find_finite(adapter, outputs, 2)
