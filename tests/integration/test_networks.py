"""The network products from params.yaml's words to a verdict: tiny networks of a user's own, and the shipped ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

import stages.evaluate
import stages.gate
import stages.optimize
from evalsets.seal import seal
from pipeline.errors import (
    CheckpointError,
    EngineError,
    EvalsetError,
    EvidenceError,
    JournalError,
    QuantgateError,
    SettingsError,
)
from pipeline.evalsets.cards import load_evalset
from pipeline.evalsets.pictures import read_picture
from pipeline.gate.checks import check_outcomes
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import load_evidence
from pipeline.gate.verdicts import Judgement
from pipeline.products.params import get_product, load_params, parse_params
from pipeline.products.text.serving.engines.keeper import list_descendants
from pipeline.products.vision import candidate, preflight, same_pictures, workers
from pipeline.products.vision.candidate import build_network_candidate
from pipeline.products.vision.evaluate import evaluate_network, open_replica
from pipeline.products.vision.findings.wholes import check_wholes
from pipeline.products.vision.preflight import check_network
from pipeline.products.vision.serving import read_network_candidate
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.digests import digest_file, digest_pixels
from pipeline.records.evaluations import CaseRecord, NetworkCandidate, read_cases
from pipeline.records.record_files import write_record
from pipeline.report.terminal import render_gate
from pipeline.running.journal import drop_finished
from pipeline.running.progress import STEP
from pipeline.running.shards import Shard
from pipeline.running.tracing import list_traces
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.processes import is_running, wait_for_end
from tests.fakes.synthetic_records import describe_project
from tests.fakes.tiny_networks import (
    DETECTOR,
    NUM_PICTURES,
    describe_detector,
    make_detector,
    make_upscaler,
    write_detector,
    write_evalset,
    write_project,
    write_views,
)
from tests.fakes.workers_here import start_here
from tests.paths import ROOT

HALF = {"kind": "precision", "dtype": "float16"}
LAST = {"kind": "channels_last"}
COMPILED = {"kind": "compile", "mode": "default"}
DETECTOR_FILE, UPSCALER_FILE = "detector/adapter.py", "upscaler/adapter.py"
FORWARD = "return self.pool(self.scale(self.blur(x)))"
Damage = Callable[[Path], Any]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate without other processes, which take seconds to start."""

    monkeypatch.setattr(workers, "start_workers", start_here)


def build(root: Path, product: VisionProduct, name: str) -> NetworkCandidate:
    return build_network_candidate(name, product, root=root, build=root / product.build)


def evaluate(root: Path, product: VisionProduct, name: str) -> list[CaseRecord]:
    """Evaluate what was built; return the records of the first eval."""
    folder = root / product.build
    evaluate_network(read_network_candidate(folder, name, product), product, root=root, build=folder)
    return read_cases(folder / f"evaluations/{name}" / f"{next(iter(product.evals))}.jsonl")


def run(root: Path, product: VisionProduct, *names: str) -> list[list[CaseRecord]]:
    found = []
    for name in names or product.candidates:
        build(root, product, name)
        found.append(evaluate(root, product, name))
    return found


def read_notes(root: Path, product: VisionProduct, name: str) -> dict[str, Any]:
    folder = root / product.build / "evaluations" / name
    return dict(json.loads((folder / f"{next(iter(product.evals))}.json").read_text()))


def list_results(root: Path, product: VisionProduct, name: str) -> dict[str, str]:
    """Return the digests of all that an evaluation found: not of what it cost."""
    folder = root / product.build / "evaluations" / name
    return {
        path.relative_to(folder).as_posix(): digest_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".json"
    }


def edit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def say(error: pytest.ExceptionInfo[Exception]) -> str:
    """Return an error's message, which is one line."""
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_detector, "half"),
        (make_upscaler, "tiled"),
    ],
)
def test_processes_find_byte_for_byte_what_one_does(
    project: Path, make: Callable[..., VisionProduct], name: str, request: pytest.FixtureRequest
) -> None:
    """Were a time or an order of work in the records, each run would be another candidate to DVC."""
    changes = {"serving": {"batch_size": 4, "num_threads": 1}, "resources": {"num_workers": 2}}
    run(project, make(**changes), name)
    first = list_results(project, make(), name)
    request.getfixturevalue("here")
    run(project, make(**changes), name)
    assert list_results(project, make(), name) == first
    assert len(first) >= 2 and not list(project.rglob("__pycache__"))
    assert not (project / make().build / "journal" / name).exists()


def test_a_trace_is_of_one_batch_and_no_result_of_its_own(project: Path, here: None) -> None:
    product = make_detector()
    run(project, product, "half")
    plain = list_results(project, product, "half")
    traced = product.candidates["half"].model_copy(update={"trace": True})
    run(project, product.model_copy(update={"candidates": product.candidates | {"half": traced}}), "half")
    evaluation = project / product.build / "evaluations/half"
    assert [path.name for path in list_traces(evaluation)] == ["worker-0.json.gz"]
    shutil.rmtree(evaluation / "traces")
    assert list_results(project, product, "half") == plain


STAGE = """
import sys
from pathlib import Path
from pipeline.products.vision.settings import VisionProduct
from pipeline.products.vision.serving import read_network_candidate
from pipeline.products.vision.evaluate import evaluate_network
if __name__ == "__main__":
    root, product = Path(sys.argv[1]), VisionProduct.model_validate_json(sys.argv[2])
    build = root / "build/detector"
    evaluate_network(read_network_candidate(build, "squares", product), product, root=root, build=build)
"""


def test_a_second_evaluation_of_one_candidate_at_a_time_is_refused(project: Path) -> None:
    """Two would write into one folder and one journal."""
    product, folder = make_detector(), project / "build/detector"
    build(project, product, "squares")
    (folder / "journal").mkdir(exist_ok=True)
    with FileLock(folder / "journal/squares.lock"), pytest.raises(JournalError) as refused:
        evaluate(project, product, "squares")
    said = str(refused.value)
    assert "squares.lock: expected one process to work on 'squares' at a time, another one does" in said
    assert said.endswith("; wait for it or end it")
    assert "\n" not in said and not (folder / "evaluations/.squares.new").exists()


def test_shards_make_the_results_of_one_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards run in a process of their own, and what they are compared with does not."""
    product, folder = make_detector(), project / "build/detector"
    with monkeypatch.context() as context:
        context.setattr(workers, "start_workers", start_here)
        run(project, product, "squares")
    alone = list_results(project, product, "squares")
    candidate = read_network_candidate(folder, "squares", product)
    with open_replica(candidate, product, root=project, build=folder) as replica:
        num_entries = [replica.run(Shard(number, 3)) for number in (1, 2, 3)]
    assert sum(num_entries) == NUM_PICTURES and max(num_entries) < NUM_PICTURES
    monkeypatch.setattr(workers, "start_workers", start_here)
    evaluate(project, product, "squares")
    assert list_results(project, product, "squares") == alone


def test_a_kill_half_way_loses_no_finished_picture_and_leaves_no_worker(
    project: Path, request: pytest.FixtureRequest
) -> None:
    """Each batch leaves a line in a file: those that were journaled leave none after the kill."""
    calls = project / "calls.txt"
    slow = f"\n    import time\n    open({str(calls)!r}, 'a').write('call\\n')\n    time.sleep(0.3)\n    cell = config"
    edit(project, DETECTOR_FILE, "\n    cell = config", slow)
    product = make_detector()
    journal = project / "build/detector/journal/squares/squares.jsonl"
    build(project, product, "squares")
    script = project / "stage.py"
    script.write_text(STAGE)
    stage = subprocess.Popen(
        [sys.executable, str(script), str(project), product.model_dump_json()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (journal.is_file() and journal.read_text().count("\n") >= 8):
        time.sleep(0.02)
    started = list_descendants(stage.pid)
    stage.kill()
    stage.wait()
    wait_for_end(*started, limit_s=60)
    assert started and not any(map(is_running, started))
    num_batches, num_done = NUM_PICTURES // 4, journal.read_text().count("\n") // 4
    assert 2 <= num_done < num_batches
    calls.unlink()
    request.getfixturevalue("here")
    evaluate(project, product, "squares")
    assert len(calls.read_text().splitlines()) == num_batches - num_done
    resumed = list_results(project, product, "squares")
    evaluate(project, product, "squares")
    assert list_results(project, product, "squares") == resumed


@pytest.mark.usefixtures("here")
def test_an_evaluation_that_was_not_recorded_yet_is_not_run_again(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before DVC had recorded it, DVC removes the folder and runs the stage again; the journal was gone."""
    calls = project / "calls.txt"
    edit(
        project, DETECTOR_FILE, "\n    cell = config", f"\n    open({str(calls)!r}, 'a').write('.')\n    cell = config"
    )
    product = make_detector()
    monkeypatch.setenv(STEP, "evaluate@squares")
    run(project, product, "squares")
    first, num_calls = list_results(project, product, "squares"), len(calls.read_text())
    for num in (0, num_calls):
        shutil.rmtree(project / product.build / "evaluations/squares")
        calls.write_text("")
        evaluate(project, product, "squares")
        assert list_results(project, product, "squares") == first and len(calls.read_text()) == num
        drop_finished(project / product.build)  # as stage benchmark does
    assert not list((project / product.build / "journal").glob("*squares*/*"))


def swap_weights(root: Path) -> None:
    shutil.rmtree(root / "detector/squares")
    write_detector(root / "detector/squares", gain=2.0)


def change_picture(root: Path) -> None:
    Image.fromarray(np.full((32, 32, 3), 7, dtype=np.uint8)).save(root / "evalsets/squares/images/03.png")


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        pytest.param(
            swap_weights,
            EngineError,
            "detector/squares: expected the files that candidate 'half' was built of, "
            "model.safetensors differs; run `dvc repro` to build it again",
            id="weights",
        ),
        pytest.param(
            lambda root: edit(root, DETECTOR_FILE, "bright", "very bright"),
            EngineError,
            "adapter.py: expected the adapter that candidate 'half' was built with, found another; run `dvc repro`",
            id="adapter",
        ),
        pytest.param(
            lambda root: edit(root, "detector/squares/config.json", "0.3", "0.4"),
            EngineError,
            "was built of, config.json differs",
            id="config",
        ),
        pytest.param(change_picture, EvalsetError, "images/03.png: expected sha256 ", id="picture"),
        pytest.param(
            lambda root: (root / "evalsets/squares/images/03.png").unlink(),
            EvalsetError,
            "images/03.png: expected a picture",
            id="no-picture",
        ),
        pytest.param(
            lambda root: edit(root, "evalsets/squares/cases.jsonl", '"area": 64', '"area": 65'),
            EvalsetError,
            "cases.jsonl: the card says sha256 ",
            id="annotation",
        ),
    ],
)
def test_what_changed_after_the_build_is_not_evaluated(
    project: Path, here: None, damage: Damage, error: type[QuantgateError], said: str
) -> None:
    product = make_detector()
    build(project, product, "half")
    damage(project)
    with pytest.raises(error) as caught:
        evaluate(project, product, "half")
    assert said in say(caught)
    assert not (project / "build/detector/evaluations/half").exists()


def test_what_was_finished_before_a_picture_was_changed_is_kept(project: Path, here: None) -> None:
    product = make_detector()
    whole = (project / "evalsets/squares/images/39.png").read_bytes()
    build(project, product, "half")
    (project / "evalsets/squares/images/39.png").write_bytes(whole + b"x")
    with pytest.raises(EvalsetError, match="39.png: expected sha256"):
        evaluate(project, product, "half")
    journal = project / "build/detector/journal/half/squares.jsonl"
    assert journal.read_text().count("\n") == NUM_PICTURES - 4
    (project / "evalsets/squares/images/39.png").write_bytes(whole)
    assert len(evaluate(project, product, "half")) == NUM_PICTURES


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param(
            "import torch\n",
            "import torch\nimport no_such_package\n",
            "adapter.py: the adapter can't be "
            "imported: ModuleNotFoundError: No module named 'no_such_package' (line 3)",
            id="import-error",
        ),
        pytest.param(
            "def build(config):",
            "def build(config:",
            "adapter.py: the adapter can't be imported: SyntaxError: '(' was never closed (line 17)",
            id="syntax-error",
        ),
        pytest.param(
            "def postprocess",
            "def finish",
            "adapter.py: expected the functions build, preprocess, postprocess, found no postprocess",
            id="missing-function",
        ),
        pytest.param(
            "return Squares(config)",
            "return None",
            "adapter.py: build() returned 'NoneType', expected a torch.nn.Module",
            id="no-module",
        ),
        pytest.param(
            "return Squares(config)",
            "return Squares(config['no'])",
            "adapter.py: build() failed: KeyError: 'no' (line 18); correct the adapter",
            id="build-fails",
        ),
    ],
)
def test_an_adapter_that_can_not_build_is_one_line(project: Path, old: str, new: str, said: str) -> None:
    """Paths are given relative to the project: lines of the file were not found under them."""
    edit(project, DETECTOR_FILE, old, new)
    product = make_detector()
    with pytest.raises((CheckpointError, EngineError)) as caught:
        build(project, product, "half")
    assert said in say(caught)
    assert not list((project / "build").rglob("candidate.json"))


def test_a_line_of_the_adapter_is_named_from_the_project_root(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages run there with relative paths, and Python's own frames have absolute ones."""
    monkeypatch.chdir(project)
    edit(project, DETECTOR_FILE, "return Squares(config)", "return Squares(config['no'])")
    with pytest.raises(EngineError, match=r"^detector/adapter.py: build\(\) failed: KeyError: 'no' \(line 18\)"):
        build(Path(), make_detector(), "half")


RESULT = '{"bbox": [0, 0, 8, 8], "score": 1, "category_id": 1}'


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param(
            "pixels.permute(0, 3, 1, 2).float().mean(1, keepdim=True)",
            "pixels.float().mean(3)",
            "adapter.py: preprocess() returned (4, 32, 32), expected a tensor of shape (4, channels, rows, columns)",
            id="preprocess-shape",
        ),
        pytest.param(
            "pixels.permute(0, 3, 1, 2).float().mean(1, keepdim=True)",
            "None",
            "adapter.py: preprocess() returned 'NoneType', expected a tensor",
            id="preprocess-none",
        ),
        pytest.param(
            "pixels.permute(0, 3, 1, 2).float().mean(1, keepdim=True)",
            "pixels.permute(0, 3, 1, 2).float()",
            "adapter.py: the module failed on an input of shape (4, 3, 32, 32): RuntimeError: ",
            id="channels",
        ),
        pytest.param(
            "pixels.permute",
            "pixels.permited",
            "adapter.py: preprocess() failed: AttributeError: 'Tensor' object has no attribute 'permited' (line 22)",
            id="preprocess-fails",
        ),
        pytest.param(
            FORWARD,
            "assert x.min() > 999, 'too dark'",
            "adapter.py: the module failed on an input of shape (4, 1, 32, 32): AssertionError: too dark (line 14)",
            id="forward-fails",
        ),
        pytest.param(
            FORWARD,
            "return {'boxes': [1.0]}",
            "adapter.py: the module returned 'dict' without a tensor in it",
            id="no-tensor",
        ),
        pytest.param(
            "return [[{",
            "1 / 0\n    return [[{",
            "adapter.py: postprocess() failed: ZeroDivisionError: division by zero (line 27)",
            id="postprocess-fails",
        ),
        pytest.param(
            "return [[{",
            "return 7\n    return [[{",
            "postprocess() returned 'int', expected results of each of 4 pictures; correct the adapter; the "
            "batch began with case 'c00'",
            id="no-list",
        ),
        pytest.param(
            "return [[{",
            "return torch.tensor(7)\n    return [[{",
            "postprocess() returned 'Tensor', expected results of each of 4 pictures",
            id="tensor-without-length",
        ),
        pytest.param(
            "return [[{",
            "return [[]]\n    return [[{",
            "postprocess() returned 'list' of 1, expected results of each of 4 pictures",
            id="too-few-lists",
        ),
        pytest.param(
            "return [[{",
            "return [{}] * 4\n    return [[{",
            "case 'c00': postprocess() returned 'dict' for a picture, expected a list of COCO results",
            id="no-list-of-a-picture",
        ),
        pytest.param(
            "return [[{",
            "return [[3]] * 4\n    return [[{",
            "case 'c00': postprocess() returned '3', expected a COCO result with bbox, score and category_id",
            id="no-result",
        ),
        pytest.param(
            "[column * cell, row * cell, cell, cell]",
            "[0, 0, 8]",
            "a box has left, top, width and height",
            id="three-sides",
        ),
        pytest.param(
            "[column * cell, row * cell, cell, cell]", "[9, 9, -1, 8]", "the last two 0 or more", id="negative-side"
        ),
        pytest.param(
            '"category_id": 1',
            '"class": 1',
            "expected a COCO result with bbox, score and category_id ('category_id')",
            id="other-key",
        ),
        pytest.param(
            '"category_id": 1',
            '"category_id": float("inf")',
            "category_id is a whole number, got inf",
            id="infinite-category",
        ),
    ],
)
def test_a_detector_that_breaks_its_contract_is_one_line(
    project: Path, here: None, old: str, new: str, said: str
) -> None:
    edit(project, DETECTOR_FILE, old, new)
    product = make_detector()
    build(project, product, "squares")
    with pytest.raises(EngineError) as caught:
        evaluate(project, product, "squares")
    assert said in say(caught)


@pytest.mark.parametrize("step", [HALF, COMPILED], ids=["half", "compiled"])
def test_a_mistake_in_postprocess_is_told_before_anything_is_compiled_or_timed(
    project: Path, here: None, monkeypatch: pytest.MonkeyPatch, step: dict[str, Any]
) -> None:
    """It was told after all of that, which takes minutes."""
    calls: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        def call(*_given: Any, **_named: Any) -> dict[str, Any]:
            calls.append(name)
            return {}

        return call

    product = make_detector({"mine": [step]})
    edit(project, DETECTOR_FILE, "return [[{", "1 / 0\n    return [[{")
    build(project, product, "mine")
    monkeypatch.setattr(workers, "measure_costs", note("timed"))
    monkeypatch.setattr(workers, "compare_layers", note("compared"))
    monkeypatch.setattr(torch, "compile", lambda *_given, **_named: note("compiled"))
    with pytest.raises(EngineError, match=r"postprocess\(\) failed: ZeroDivisionError: .*began with case 'c00'"):
        evaluate(project, product, "mine")
    assert calls == []


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            "outputs[..., 1:].to(torch.uint8).permute(0, 2, 3, 1)",
            "returned torch.uint8 of shape (128, 191, 3), expected a "
            "tensor of uint8 of the target's shape (128, 192, 3)",
        ),
        ("outputs.permute(0, 2, 3, 1)", "returned torch.float32 of shape (128, 192, 3)"),
        ("outputs.to(torch.uint8)", "returned torch.uint8 of shape (3, 128, 192)"),
        ("outputs.to(torch.uint8).permute(0, 2, 3, 1).numpy()", "returned 'ndarray', expected a tensor of uint8"),
        ("[None for _ in outputs]", "returned 'NoneType', expected a tensor of uint8"),
    ],
)
def test_an_enlarged_picture_of_another_size_or_type_is_one_line(
    project: Path, here: None, new: str, said: str
) -> None:
    edit(project, UPSCALER_FILE, "(outputs.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)", new)
    product = make_upscaler()
    build(project, product, "doubled")
    with pytest.raises(EngineError) as caught:
        evaluate(project, product, "doubled")
    assert f"case 'v0': postprocess() {said}" in say(caught)


def test_a_module_whose_tiles_do_not_grow_alike_is_one_line(project: Path, here: None) -> None:
    edit(project, UPSCALER_FILE, "return self.shuffle(self.blur(x)) - ", "return self.blur(x)[:, :3, 1:, 1:] - ")
    product = make_upscaler()
    build(project, product, "tiled")
    with pytest.raises(EngineError, match="adapter.py: tiles: expected a decoded tile of a whole multiple of"):
        evaluate(project, product, "tiled")


@pytest.mark.parametrize(
    ("taken", "fed", "shape"),
    [
        ("shuffle(self.blur(x))", "F.pixel_unshuffle({}, 2)", "(32, 48)"),
        ("shuffle(self.blur(x))[:, :, 32:-32, 32:-32]", "F.pad({}, (16, 16, 16, 16), mode='reflect')", "(96, 128)"),
    ],
)
def test_tiles_of_what_is_not_as_large_as_the_picture_are_one_line(
    project: Path, here: None, taken: str, fed: str, shape: str
) -> None:
    """Tiles met elsewhere than where seams are looked for: seams of 8 levels were said to be -7, and passed."""
    edit(project, UPSCALER_FILE, "import torch\n", "import torch\nfrom torch.nn import functional as F\n")
    pixels = "pixels.permute(0, 3, 1, 2).float() / 255"
    edit(project, UPSCALER_FILE, pixels, fed.format(pixels))
    edit(project, UPSCALER_FILE, "shuffle(self.blur(x))", taken)
    product = make_upscaler()
    build(project, product, "tiled")
    message = rf"adapter.py: preprocess\(\) made {re.escape(shape)} of pictures of \(64, 96\), .*; pad or .* module"
    with pytest.raises(EngineError, match=message):
        evaluate(project, product, "tiled")


def test_results_of_a_dying_process_are_asked_for_again(project: Path) -> None:
    """The line says what to lower; a traceback of a broken pool would not."""
    edit(project, DETECTOR_FILE, "    cell = config", "    import os\n    os._exit(3)\n    cell = config")
    product = make_detector()
    build(project, product, "squares")
    with pytest.raises(
        EngineError,
        match="squares: a process that ran pictures ended by itself.*lower "
        "products.detector.serving.batch_size or resources.num_workers; finished pictures are kept",
    ):
        evaluate(project, product, "squares")


def test_what_keeps_a_process_from_loading_is_told_by_it(project: Path) -> None:
    product = make_detector()
    build(project, product, "squares")
    swap_weights(project)
    with pytest.raises(EngineError, match="expected the files that candidate 'squares' was built of"):
        evaluate(project, product, "squares")


def save_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["blur.weight"][0, 0, 1, 1] = float("nan")
    save_file(weights, folder / "model.safetensors")


def save_other(folder: Path) -> None:
    save_file({"blur.weight": torch.zeros(1, 1, 5, 5)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(save_nan, "detector/hot: tensor 'blur.weight' has 1 NaN or infinite values of 9", id="nan"),
        pytest.param(save_other, "detector/hot: expected the weights of what ", id="other-weights"),
        pytest.param(
            lambda f: (f / "model.safetensors").rename(f / "model.pt"),
            "expected safetensors weights, found pickle weights 'model.pt'",
            id="pickle",
        ),
        pytest.param(
            lambda f: (f / "model.safetensors").write_bytes(b"x" * 50),
            "not a safetensors file, or cut short at 50 bytes",
            id="cut",
        ),
        pytest.param(lambda f: (f / "model.safetensors").unlink(), "expected model.safetensors or ", id="no-weights"),
        pytest.param(
            lambda f: (f / "config.json").unlink(),
            "config.json: expected the network's config, found no file",
            id="no-config",
        ),
        pytest.param(
            lambda f: (f / "config.json").write_text("{"),
            "config.json: expected the network's config, got no JSON: ",
            id="config-no-json",
        ),
        pytest.param(
            lambda f: (f / "config.json").write_text("[]"),
            "config.json: expected the network's config, got list",
            id="config-no-object",
        ),
        pytest.param(
            lambda f: shutil.rmtree(f),
            "expected a folder with config.json and model.safetensors, found none",
            id="no-folder",
        ),
    ],
)
def test_a_damaged_folder_is_one_line_and_never_built(project: Path, damage: Damage, said: str) -> None:
    product = make_detector({"hot": []})
    damage(project / "detector/hot")
    with pytest.raises(CheckpointError) as caught:
        build(project, product, "hot")
    assert said in say(caught)
    if "weights of what" not in said and "NaN" not in said:  # which headers alone don't tell
        with pytest.raises(SettingsError) as refused:
            check_network(product, project)
        assert say(refused).startswith("candidates.hot.checkpoint: ") and said in say(refused)


def test_weights_in_several_files_are_read_as_headers_say(project: Path, here: None) -> None:
    """The headers of shards were checked before any work, and then one file was asked for that is not there."""
    folder = project / "detector/squares"
    weights = load_file(folder / "model.safetensors")
    whole = run(project, make_detector(), "squares")
    for number, names in enumerate((["blur.weight", "blur.bias"], ["scale.weight", "scale.bias"])):
        save_file({name: weights[name] for name in names}, folder / f"model-{number}.safetensors")
    index = {name: f"model-{name.startswith('scale'):d}.safetensors" for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "model.safetensors").unlink()
    check_network(make_detector(), project)
    (shards,) = run(project, make_detector(), "squares")
    assert [record.output for record in shards] == [record.output for record in whole[0]]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        pytest.param(
            {"rules": [{"layers": ["blurr"], "algorithm": "direct", "dtype": "float32"}]},
            "candidates.policy.steps.0.rules.0.layers.0: 'blurr' matches no convolution; the nearest are blur, scale",
            id="no-such-layer",
        ),
        pytest.param(
            {"rules": [{"layers": ["blur", "pool*"], "algorithm": "direct", "dtype": "float32"}]},
            "steps.0.rules.0.layers.1: 'pool*' matches no convolution",
            id="no-convolution",
        ),
    ],
)
def test_a_pattern_that_names_no_layer_is_told_with_the_nearest(project: Path, step: dict[str, Any], said: str) -> None:
    policy = {"kind": "conv_policy", "algorithm": "winograd_f43", "dtype": "float16"} | step
    with pytest.raises(SettingsError) as caught:
        build(project, make_detector({"policy": [policy]}), "policy")
    assert said in say(caught)


def test_a_policy_of_a_network_without_convolutions_is_refused(project: Path) -> None:
    """It would be the reference under another name, and pass."""
    edit(project, DETECTOR_FILE, "nn.Conv2d(1, 1, 3, padding=1)", "nn.Identity()")
    edit(project, DETECTOR_FILE, "nn.Conv2d(1, 1, 1)", "nn.Identity()")
    save_file({}, project / "detector/squares/model.safetensors")
    product = make_detector({"policy": [{"kind": "conv_policy", "algorithm": "direct", "dtype": "float16"}]})
    assert build(project, product, "squares").checkpoint.num_parameters == 0
    with pytest.raises(SettingsError, match="candidates.policy.steps.0: expected convolutions that a policy covers"):
        build(project, product, "policy")


def rewrite_cases(root: Path, change: Callable[[int, dict[str, Any]], object], name: str = "squares") -> None:
    path = root / "evalsets" / name / "cases.jsonl"
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    for number, case in enumerate(cases):
        change(number, case)
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    seal(path.parent)


def shrink_views(root: Path) -> None:
    shutil.rmtree(root / "evalsets/views")
    write_views(root / "evalsets/views", size=(32, 32))


def drop_annotations(root: Path) -> None:
    rewrite_cases(root, lambda _, case: case.update(annotations=[]))


def repeat_case(root: Path, **changed: Any) -> None:
    path = root / "evalsets/squares/cases.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    path.write_text(path.read_text() + json.dumps(first | {"id": "again"} | changed) + "\n")
    seal(path.parent)


def repeat_picture(root: Path) -> None:
    repeat_case(root, annotations=[])


def save_picture_again(root: Path) -> None:
    """Add a case of the first picture in a file of other bytes and the same pixels."""
    folder = root / "evalsets/squares/images"
    with Image.open(folder / "00.png") as picture:
        picture.save(folder / "again.png", compress_level=0)
    assert (folder / "again.png").read_bytes() != (folder / "00.png").read_bytes()
    repeat_case(root, annotations=[], image="images/again.png")


def shrink_target(root: Path) -> None:
    """Halve a target after it was sealed as another size: the card alone is brought up to date."""
    path = root / "evalsets/views/targets/1.png"
    with Image.open(path) as picture:
        picture.resize((96, 64)).save(path)
    cases = root / "evalsets/views/cases.jsonl"
    lines = [json.loads(line) for line in cases.read_text().splitlines()]
    lines[1]["target_sha256"] = digest_file(path)
    cases.write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = YAML(typ="safe").load((root / "evalsets/views/card.yaml").read_text())
    (root / "evalsets/views/card.yaml").write_text(json.dumps(card | {"sha256": digest_file(cases)}))


def tolerate(metric: str, bucket: str) -> dict[str, Any]:
    gate = describe_detector()["gate"]
    return {"gate": gate | {"tolerances": gate["tolerances"] | {metric: {"overall": 0.1, "buckets": {bucket: 0.1}}}}}


VIEWS = {"squares": {"kind": "detection", "evalset": "evalsets/views"}}


@pytest.mark.parametrize(
    ("make", "changes", "damage", "error", "said"),
    [
        pytest.param(
            make_detector,
            {"adapter": "gone.py"},
            None,
            SettingsError,
            "products.detector.adapter: expected a Python file with build, preprocess and postprocess, found none at ",
            id="no-adapter",
        ),
        pytest.param(
            make_detector,
            {"adapter": "detector"},
            None,
            SettingsError,
            "products.detector.adapter: expected a Python file, got ",
            id="adapter-is-a-folder",
        ),
        pytest.param(
            make_detector,
            {},
            lambda root: edit(root, DETECTOR_FILE, "def build(config):", "def build(config:"),
            SettingsError,
            "adapter.py:17: expected Python: '(' was never closed",
            id="adapter-syntax",
        ),
        pytest.param(
            make_detector,
            {"evals": VIEWS},
            None,
            SettingsError,
            "products.detector.evals.squares.evalset: expected an evalset of kind 'detection', "
            "'views' is of kind 'upscaling'",
            id="evalset-of-another-kind",
        ),
        pytest.param(
            make_detector,
            {"calibration_images": "evalsets/views"},
            None,
            SettingsError,
            "products.detector.calibration_images: expected an evalset of kind 'detection'",
            id="calibration-kind",
        ),
        pytest.param(
            make_detector,
            {"calibration_images": "evalsets/none"},
            None,
            SettingsError,
            "products.detector.calibration_images: expected an evalset folder",
            id="no-calibration",
        ),
        pytest.param(
            make_detector,
            {},
            drop_annotations,
            SettingsError,
            "products.detector.evals.squares.evalset: expected an object on some picture, evalset 'squares' has none",
            id="nothing-annotated",
        ),
        pytest.param(
            make_detector,
            {},
            repeat_case,
            EvalsetError,
            "cases.jsonl:41: case 'again' asks and expects the same as the case on line 1",
            id="case-twice",
        ),
        pytest.param(
            make_detector,
            {},
            repeat_picture,
            EvalsetError,
            "cases.jsonl:41: case 'again' shows the same picture as the case on line 1; every picture may count once",
            id="picture-twice",
        ),
        pytest.param(
            make_detector,
            {},
            save_picture_again,
            EvalsetError,
            "cases.jsonl:41: case 'again' shows the same picture as the case on line 1; every picture may count once, "
            "however its file was saved",
            id="picture-saved-again",
        ),
        pytest.param(
            make_detector, {}, change_picture, EvalsetError, "cases.jsonl:4: case 'c03': ", id="picture-changed"
        ),
        pytest.param(
            make_detector,
            tolerate("squares/ap", "night"),
            None,
            SettingsError,
            "products.detector.gate.tolerances."
            "squares/ap.buckets.night: evalset 'squares' has no such bucket; it has bright, dim, tiny",
            id="no-such-bucket",
        ),
        pytest.param(
            make_detector,
            tolerate("squares/finite_output_rate", "tiny"),
            None,
            SettingsError,
            "products.detector.gate."
            "tolerances.squares/finite_output_rate.buckets.tiny: evalset 'squares' has no such bucket; it has "
            "bright, dim",
            id="an-area-is-no-bucket-of-pictures",
        ),
        pytest.param(
            make_detector,
            {"evals": {"squares": {"kind": "detection", "evalset": "evalsets/squares", "areas": {"dim": [0.0, 9.0]}}}},
            None,
            SettingsError,
            "products.detector.evals.squares.areas: 'dim' is an area of objects, and a bucket of pictures",
            id="area-named-as-a-bucket",
        ),
        pytest.param(
            make_detector,
            {"evals": {"squares": {"kind": "detection", "evalset": "evalsets/squares", "categories": {"round": 7}}}},
            None,
            SettingsError,
            "products.detector.evals.squares.categories.round: expected a category that evalset 'squares' has (1), "
            "got 7",
            id="no-such-category",
        ),
        pytest.param(
            make_detector,
            {"evals": {"squares": {"kind": "detection", "evalset": "evalsets/squares", "categories": {"dim": 1}}}},
            None,
            SettingsError,
            "products.detector.evals.squares.categories: 'dim' is a category of objects, and a bucket of pictures",
            id="category-named-as-a-bucket",
        ),
        pytest.param(
            make_upscaler,
            {},
            shrink_views,
            SettingsError,
            "candidates.tiled.steps.0.tile: expected a picture larger than a tile in evalset 'views', "
            "got 32 pixels, and its largest has 32: no seam could show",
            id="one-tile-for-each-picture",
        ),
        pytest.param(
            make_upscaler,
            {},
            shrink_target,
            EvalsetError,
            "cases.jsonl:2: case 'v1': expected a target of 2 "
            "times the image's sides, as of the cases before, got 1 times",
            id="target-of-another-size",
        ),
    ],
)
def test_what_files_contradict_is_told_before_any_work(
    project: Path,
    make: Callable[..., VisionProduct],
    changes: dict[str, Any],
    damage: Damage | None,
    error: type[QuantgateError],
    said: str,
) -> None:
    if damage is not None:
        damage(project)
    with pytest.raises(error) as caught:
        check_network(make(**changes), project)
    assert said in say(caught)


def test_a_detector_whose_sizes_are_not_gated_is_refused(project: Path) -> None:
    """Nothing but finite outputs was gated, and any loss of small objects passed."""
    tolerances = {"squares/ap": {"overall": 0.1}, "squares/finite_output_rate": {"overall": 0.1}}
    gate = {"alpha": 0.05, "on_inconclusive": "block"}
    with pytest.raises(SettingsError, match="tolerances.squares/ap_small: expected an overall tolerance"):
        check_network(make_detector(gate=gate | {"tolerances": tolerances}), project)
    advisory = {"squares/ap_small": {"overall": 0.1, "tier": "advisory"}}
    with pytest.raises(SettingsError, match="tolerances.squares/ap_small: .* found an advisory one"):
        check_network(make_detector(gate=gate | {"tolerances": tolerances | advisory}), project)
    with pytest.raises(SettingsError, match="tolerances.squares/ap_large: .* has no object of that size"):
        check_network(
            make_detector(
                gate=gate
                | {"tolerances": tolerances | {f"squares/ap_{size}": {"overall": 0.1} for size in ("small", "large")}}
            ),
            project,
        )


def test_a_sound_project_is_let_through(project: Path) -> None:
    """Without it a check that refuses everything would pass all above."""
    product = make_detector(**tolerate("squares/ap", "tiny"))
    assert not check_network(product, project) and not check_network(make_upscaler(), project)


class CountedPasses(tuple[Any, ...]):
    """Cases that count how often somebody walks over all of them."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


def test_cases_are_not_read_again_for_each_category(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """365 categories on 20,000 pictures took a quarter of a minute, each time that anything was checked."""

    def count(num_categories: int) -> int:
        rewrite_cases(
            project, lambda i, case: [a.update(category_id=1 + i % num_categories) for a in case["annotations"]]
        )
        read = load_evalset(project / "evalsets/squares")
        cases = CountedPasses(read.cases)
        counted = read.model_copy(update={"cases": cases})
        monkeypatch.setattr(preflight, "load_evalset", lambda _: counted)
        check_network(make_detector(), project)
        return cases.passes

    assert count(8) == count(2)


def test_several_categories_in_few_clusters_are_warned_of(project: Path) -> None:
    """Nothing judges them: one of eighty could be lost within a tolerance of two points."""
    rewrite_cases(project, lambda i, case: [a.update(category_id=4) for a in case["annotations"] if i < 9])
    [warning] = check_network(make_detector(), project)
    assert warning.startswith(
        "products.detector.evals.squares.categories: AP is the mean of 2 categories, and 1 of them "
        "(category 4) are in fewer than 10 clusters each"
    )
    rewrite_cases(project, lambda i, case: [a.update(category_id=4) for a in case["annotations"] if i < 10])
    assert not check_network(make_detector(), project)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"person": 1}, None),
        ({"small": 1}, "categories.small: expected another name than an area's"),
        ({"person": 1, "human": 1}, "categories.human: category 1 is 'person' already"),
        ({"person": 2}, "annotations have a category_id that is not there, first 1 of case 'c00'"),
    ],
)
def test_a_card_names_the_categories_of_its_annotations(project: Path, names: dict[str, int], said: str | None) -> None:
    path = project / "evalsets/squares/card.yaml"
    card = YAML(typ="safe").load(path.read_text())
    path.write_text(json.dumps(card | {"categories": names}))
    if said is None:
        assert not check_network(make_detector(), project)
        return
    with pytest.raises(EvalsetError) as error:
        check_network(make_detector(), project)
    assert said in say(error)


def test_a_category_is_the_same_for_the_card_and_the_settings(project: Path) -> None:
    """The card's won silently: a tolerance of one category judged another, and its own was not watched at all."""
    rewrite_cases(project, lambda i, case: [a.update(category_id=3 + 4 * (i % 2)) for a in case["annotations"]])
    path = project / "evalsets/squares/card.yaml"
    card = YAML(typ="safe").load(path.read_text())
    path.write_text(json.dumps(card | {"categories": {"forklift": 3, "truck": 7}}))
    named = {"kind": "detection", "evalset": "evalsets/squares"}
    assert check_network(make_detector(evals={"squares": named | {"categories": {"forklift": 3}}}), project) == []
    with pytest.raises(SettingsError) as error:
        check_network(make_detector(evals={"squares": named | {"categories": {"forklift": 7}}}), project)
    assert (
        "products.detector.evals.squares.categories.forklift: expected 3, which the card of evalset 'squares' gives "
        "that name, got 7; correct one of the two, or rename the bucket"
    ) in say(error)


def test_pictures_that_are_evaluated_on_are_not_calibrated_on(project: Path) -> None:
    with pytest.raises(SettingsError, match="calibration_images: expected pictures that no eval shows, got 40"):
        check_network(make_detector(calibration_images="evalsets/squares"), project)


def test_a_picture_that_was_saved_anew_is_not_calibrated_on(project: Path) -> None:
    """One pixel less is another picture."""
    shutil.copytree(project / "evalsets/squares", project / "evalsets/again")
    for number, path in enumerate(sorted((project / "evalsets/again/images").iterdir())):
        with Image.open(path) as picture:
            pixels = np.array(picture)
        pixels[0, 0, 0] ^= number > 2
        Image.fromarray(pixels).save(path, compress_level=0)
    seal(project / "evalsets/again")
    with pytest.raises(SettingsError, match="calibration_images: expected pictures that no eval shows, got 3 of"):
        check_network(make_detector(calibration_images="evalsets/again"), project)


def test_pixels_are_decoded_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_network(make_detector(), project)
    read: list[Path] = []
    decode = same_pictures.read_picture

    def count(path: Path, sha256: str) -> Any:
        read.append(path)
        return decode(path, sha256)

    monkeypatch.setattr(same_pictures, "read_picture", count)
    check_network(make_detector(), project)
    assert not read
    (project / same_pictures.KEPT).write_text("{")
    check_network(make_detector(), project)
    monkeypatch.setattr(same_pictures, "_name_decoder", lambda: "another one")
    check_network(make_detector(), project)
    assert len(read) == 2 * 40


def test_what_was_decoded_before_a_damaged_picture_is_kept(project: Path) -> None:
    last = project / "evalsets/squares/images/39.png"
    last.write_bytes(last.read_bytes()[:-40])
    seal(project / "evalsets/squares")
    with pytest.raises(EvalsetError, match=r"cases.jsonl:40: case 'c39': .*39.png: expected a picture"):
        check_network(make_detector(), project)
    assert len(json.loads((project / same_pictures.KEPT).read_text())) == 39


def test_a_category_of_crowds_alone_has_no_bucket(project: Path) -> None:
    crowd = {"category_id": 4, "iscrowd": True}
    rewrite_cases(project, lambda i, case: [a.update(crowd) for a in case["annotations"] if i % 2])
    named = {"squares": {"kind": "detection", "evalset": "evalsets/squares", "categories": {"four": 4}}}
    with pytest.raises(SettingsError, match="categories.four: expected a category that evalset 'squares' has"):
        check_network(make_detector(evals=named), project)


def test_a_candidate_in_tiles_needs_a_tolerance_of_seams(project: Path) -> None:
    gate = make_upscaler().gate
    left = {name: t.model_dump() for name, t in gate.tolerances.items() if "seam" not in name}
    with pytest.raises(SettingsError, match="tolerances.views/seam_step_levels: expected an overall tolerance"):
        check_network(make_upscaler(gate={"alpha": 0.05, "on_inconclusive": "block", "tolerances": left}), project)


def test_a_half_overlap_of_an_odd_tile_can_be_cut(project: Path, here: None) -> None:
    """5.5 pixels of 11 were rounded up, to more than tiles can overlap by."""
    step = {"kind": "tiling", "tile": 11, "overlap": 0.5, "window": "linear"}
    product = make_upscaler({"odd": [step]})
    check_network(product, project)
    (records,) = run(project, product, "odd")
    assert all(record.scores["finite"] for record in records)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody"], "candidates: expected one of agent, "),
        (["detector"], "got 'detector'"),
        ([], "expected the name of one candidate, got ''"),
        (["people", "compiled"], "expected the name of one candidate, got 'people compiled'"),
    ],
)
@pytest.mark.parametrize("stage", ["optimize", "evaluate"])
def test_a_stage_refuses_unknown_names_on_its_command_line(stage: str, words: list[str], said: str) -> None:
    main = {"optimize": stages.optimize.main, "evaluate": stages.evaluate.main}[stage]
    with pytest.raises(SettingsError) as caught, in_folder(ROOT):
        main(words)
    assert said in say(caught)


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_a_stage_says_one_line_and_exits_1() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "stages.evaluate", "nobody"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 1 and child.stderr.count("\n") == 1
    assert child.stderr.startswith("quantgate evaluate: candidates: expected one of ")


def test_what_was_not_built_is_not_evaluated(project: Path) -> None:
    with pytest.raises(EvidenceError, match="candidates/half/candidate.json: expected a BuiltCandidate, found no file"):
        evaluate(project, make_detector(), "half")


def test_overflow_on_some_pictures_is_counted_and_fails(project: Path, here: None) -> None:
    """Bright squares overflow float16; their results are left out, and AP of the others stays a number."""
    product = make_detector({"hot": [HALF]})
    _, records = run(project, product)
    is_bright = ["bright" in record.buckets for record in records]
    assert [record.scores["finite"] == 0 for record in records] == is_bright
    assert all(json.loads(record.output) == [] for record in records if "bright" in record.buckets)
    assert all(record.scores["found"] == record.scores["objects"] for record in records if "dim" in record.buckets)
    compared = compare_release(product, project / "build/detector")
    (verdict,) = compared.judgement.verdicts
    assert verdict.outcome == "fail"
    found = {c.metric: c for c in verdict.comparisons if c.bucket is None}
    assert found["squares/finite_output_rate"].candidate == 0.5
    assert found["squares/finite_output_rate"].outcome == found["squares/ap"].outcome == "fail"
    assert 0.4 < found["squares/ap"].candidate < 0.6


def test_an_adapter_that_can_not_take_nan_costs_only_the_pictures_that_hold_it(project: Path, here: None) -> None:
    """It was run on whole batches: one overflow ended the evaluation, or took three sound pictures with it."""
    edit(
        project,
        DETECTOR_FILE,
        "    return [[{",
        "    [int(most) for most in outputs.amax((1, 2, 3)).tolist()]\n    return [[{",
    )
    _, records = run(project, make_detector({"hot": [HALF]}))
    assert [record.scores["finite"] == 0 for record in records] == ["bright" in record.buckets for record in records]
    assert all(json.loads(record.output) == [] for record in records if "bright" in record.buckets)
    assert all(record.scores["found"] == record.scores["objects"] for record in records if "dim" in record.buckets)


def test_nan_that_an_adapter_feeds_in_is_the_worst_there_is(project: Path, here: None) -> None:
    """Clamped to a picture it looks black, and may be as like the original as any."""
    edit(project, UPSCALER_FILE, "float() / 255", "float() / 0 * 0")
    whole, tiled = run(project, make_upscaler())
    worst = {"finite": 0.0, "psnr_db": 0.0, "ssim": 0.0, "seam_levels": 255.0, "worst_seam_levels": 255.0}
    assert all(record.scores == worst for record in [*whole, *tiled])


def test_pictures_of_mixed_sizes_are_judged_as_if_alone(project: Path, here: None) -> None:
    """Batches hold one size: records must come back in the order of the cases, each with its own picture's results."""
    folder = project / "evalsets/squares"
    for i in (1, 2, 6, 17, 30, 39):
        path = folder / f"images/{i:02d}.png"
        pixels = np.asarray(Image.open(path))
        Image.fromarray(np.pad(pixels, ((0, 8 * (i % 2)), (0, 8), (0, 0)))).save(path)
    seal(folder)
    ids = [f"c{i:02d}" for i in range(NUM_PICTURES)]
    (together,), (alone,) = (
        run(project, make_detector(serving={"batch_size": size, "num_threads": 1}), "squares") for size in (4, 1)
    )
    assert [record.case_id for record in together] == [record.case_id for record in alone] == ids
    assert [record.scores for record in together] == [record.scores for record in alone]
    assert all(record.scores["found"] == record.scores["objects"] for record in together)
    shapes = read_notes(project, make_detector(), "squares")["shapes"]
    assert shapes == {"num_shapes": 3, "timed": [1, 32, 32], "num_timed": 34, "num_pictures": NUM_PICTURES}


def test_nan_scores_beside_sound_ones_are_left_out(project: Path, here: None) -> None:
    """One NaN among a picture's results: the sound ones count, and the picture is not finite."""
    edit(
        project,
        DETECTOR_FILE,
        "    return [[{",
        '    return [[{"bbox": [1, 1, 5, float("nan")], "score": 0.5, '
        '"category_id": 1}] + found for found in _find(outputs, config)]\n\n\ndef _find(outputs, config):\n'
        '    cell = config["cell"]\n    return [[{',
    )
    (records,) = run(project, make_detector(), "squares")
    assert all(record.scores["finite"] == 0 for record in records)
    assert all(record.scores["found"] == record.scores["objects"] > 0 for record in records)


def test_a_candidate_whose_boxes_have_negative_sides_is_judged(project: Path, here: None) -> None:
    """It ended its evaluation, so that nothing of its product was judged."""
    edit(project, DETECTOR_FILE, "cell, cell]", 'config.get("side", cell), cell]')
    shutil.copytree(project / "detector/squares", project / "detector/hot", dirs_exist_ok=True)
    edit(project, "detector/hot/config.json", "{", '{"side": -0.3, ')
    product = make_detector({"hot": []})
    _, records = run(project, product)
    assert {record.output for record in records} == {"[]"}
    assert {record.scores["finite"] for record in records} == {0.0}
    (verdict,) = compare_release(product, project / "build/detector").judgement.verdicts
    assert verdict.outcome == "fail"


def test_a_detector_that_finds_nothing_at_all_fails(project: Path, here: None) -> None:
    """No detections, no error: AP is 0, and 0 of 0 must not be read as sound."""
    shutil.copytree(project / "detector/squares", project / "detector/hot", dirs_exist_ok=True)
    edit(project, "detector/hot/config.json", "0.3", "99")
    product = make_detector({"hot": []})
    _, records = run(project, product)
    assert {record.output for record in records} == {"[]"}
    assert {record.scores["finite"] for record in records} == {1.0}
    (verdict,) = compare_release(product, project / "build/detector").judgement.verdicts
    assert verdict.outcome == "fail"
    assert next(c.candidate for c in verdict.comparisons if c.metric == "squares/ap" and c.bucket is None) == 0


def test_autocast_runs_in_its_format_and_keeps_weights(project: Path, here: None) -> None:
    step = {"kind": "precision", "dtype": "bfloat16", "autocast": True}
    product = make_detector({"mixed": [step]})
    exact, mixed = run(project, product)
    serving = read_network_candidate(project / "build/detector", "mixed", product).serving
    assert serving.autocast and serving.dtype == "bfloat16"
    ours, theirs = ([json.loads(record.output)[0]["score"] for record in side] for side in (exact, mixed))
    errors = np.abs(np.array(ours) - np.array(theirs))
    assert 0 < errors.max() < 0.02, "float32 gives the reference's own numbers"
    assert 0 < read_notes(project, product, "mixed")["speed"]["difference"] < 0.4


def test_channels_last_finds_the_same_and_its_layout_is_noted(project: Path, here: None) -> None:
    product = make_upscaler({"last": [LAST]})
    first, last = run(project, product)
    assert [record.output for record in first] == [record.output for record in last]
    notes = read_notes(project, product, "last")
    assert notes["layout"].keys() == {"other_formats", "num_reorders"}
    assert notes["speed"]["difference"] < 1e-4 and notes["speed"]["timed"]["cpu"]["ratio"]["median"] > 0
    assert notes["speed"]["baseline"] == "torch float32" and notes["compile"] is None
    assert read_notes(project, product, "doubled") | {"peak_mib": 0} == {
        "layers": {},
        "speed": None,
        "total": None,
        "int8": None,
        "beside": None,
        "compile": None,
        "layout": None,
        "peak_mib": 0,
        "peak_pixels": [64, 96],
        "work": 1.0,
        "shapes": {"num_shapes": 1, "timed": [2, 64, 96], "num_timed": 4, "num_pictures": 4},
    }


def test_graph_breaks_and_recompilations_are_counted(
    project: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own counter of breaks leaves out branches on data, which are the usual ones.

    Graphs are cut before a backend sees them: the one that generates no C++ saves a minute.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    edit(
        project,
        DETECTOR_FILE,
        FORWARD,
        "x = self.blur(x)\n        x = x if x.sum() > 0 else -x\n        "
        "print('seen')\n        return self.pool(self.scale(x))",
    )
    wider = project / "evalsets/squares/images/39.png"
    Image.fromarray(np.full((32, 40, 3), 9, dtype=np.uint8)).save(wider)
    seal(project / "evalsets/squares")
    product = make_detector({"compiled": [COMPILED]})
    exact, compiled = run(project, product)
    found = read_notes(project, product, "compiled")["compile"]
    assert found["num_graphs"] == found["num_graph_breaks"] == 2
    assert found["num_shapes"] == 3, "whole batches, the one of three before the wide picture, and that"
    assert found["num_recompilations"] >= 2 and found["num_over_limit"] == 0
    assert read_notes(project, product, "compiled")["shapes"] == {
        "num_shapes": 3,
        "timed": [4, 32, 32],
        "num_timed": 36,
        "num_pictures": NUM_PICTURES,
    }
    assert all(a.scores == b.scores for a, b in zip(exact, compiled, strict=True))


def test_what_is_timed_allocates_memory_as_a_server_does(
    project: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With freed memory kept, bfloat16 took 1.5 times as long as float32 where a server would see 1.2."""
    calls: list[str] = []
    measure = workers.measure_costs
    monkeypatch.setattr(workers, "keep_freed_memory", lambda: calls.append("keep"))

    def time_once(*given: Any, **named: Any) -> Any:
        calls.append("time")
        return measure(*given, **named)

    monkeypatch.setattr(workers, "measure_costs", time_once)
    run(project, make_detector({"half": [HALF]}), "half")
    assert calls[0] == "time" and calls.count("time") == 1 and "keep" in calls


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1)
def test_a_plain_network_compiles_into_one_graph(
    project: Path, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what is timed and what runs: another network of the same code would count towards torch's limit."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "users"))
    product = make_detector({"compiled": [COMPILED]})
    exact, compiled = run(project, product)
    assert all(a.scores == b.scores for a, b in zip(exact, compiled, strict=True))
    found = read_notes(project, product, "compiled")["compile"]
    assert found["first_call_s"] > 0.3, "the file system's cache was not asked"
    assert (found["num_graphs"], found["num_graph_breaks"], found["num_recompilations"]) == (1, 0, 0)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["unimplemented"]
    assert not (tmp_path / "users").exists() and os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "users")
    assert not list(project.rglob("*compiled/.compiled"))


def test_tiles_cost_work_and_leave_a_seam_that_is_found(project: Path, here: None) -> None:
    shutil.rmtree(project / "evalsets/views")
    write_views(project / "evalsets/views", num=1, size=(128, 192))
    tiling = {"kind": "tiling", "tile": 64, "overlap": 0.125, "window": "linear"}
    product = make_upscaler({"tiled": [tiling], "cut": [tiling | {"overlap": 0.0, "window": "none"}]})
    plain, tiled, cut = (records[0].scores for records in run(project, product))
    assert read_notes(project, product, "tiled")["work"] == 2.0, "3 tiles of 64 by 4, for 128 by 192"
    assert read_notes(project, product, "cut")["work"] == 1.0
    assert read_notes(project, product, "tiled")["speed"] is None
    assert plain["seam_levels"] == 0 and cut["seam_levels"] > 0.5 > abs(tiled["seam_levels"])
    weighed = [read_notes(project, product, name)["peak_mib"] for name in ("doubled", "tiled")]
    assert weighed[0] > 3 * 256 * 384 * 4 / 2**20 and weighed[1] < weighed[0] * 1.2


def test_tiles_are_judged_beside_what_the_reference_has_made_and_the_same_is_found(
    project: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run again for every candidate in tiles, the reference took more than half of its time."""
    product = make_upscaler()
    run(project, product, "tiled")
    alone = list_results(project, product, "tiled")
    run(project, product, "doubled")
    loads: list[str] = []
    load = workers._Loaded.load

    def note(self: Any, *given: Any) -> Any:
        loads.append(str(given))
        return load(self, *given)

    monkeypatch.setattr(workers._Loaded, "load", note)

    def evaluate_again() -> int:
        """Return how often the reference was loaded to judge the tiles."""
        loads.clear()
        evaluate(project, product, "tiled")
        assert list_results(project, product, "tiled") == alone
        return sum(product.candidates["doubled"].checkpoint in given for given in loads)

    assert evaluate_again() == 0
    assert check_again(project, product) == []
    folder = project / product.build / "evaluations/doubled"
    picture = next((folder / "views").glob("*.png"))
    for mode in ("RGB", "L"):
        Image.new(mode, Image.open(picture).size).save(picture)
        assert evaluate_again() == 1, "a picture that was changed is no evidence"
    picture.unlink()
    assert evaluate_again() == 1
    evaluate(project, product, "doubled")
    records = folder / "views.jsonl"
    records.write_text(records.read_text() + "\n")
    assert evaluate_again() == 1, "records that were changed are none"


def check_again(project: Path, product: VisionProduct) -> list[str]:
    folder = project / product.build
    loaded = (
        load_evidence(folder, read_network_candidate(folder, name, product), product.evals)
        for name in ("tiled", "doubled")
    )
    return check_wholes(*loaded)


def test_tiles_judged_beside_other_pictures_of_the_reference_are_refused(project: Path, here: None) -> None:
    """Pictures edited with all their seals, and put back, left a candidate whose seams nobody had seen."""
    product = make_upscaler()
    run(project, product, "doubled")
    folder = project / product.build / "evaluations/doubled"
    shutil.copytree(folder, project / "kept")
    seal_other_pictures(folder)
    run(project, product, "tiled")
    shutil.rmtree(folder)
    shutil.copytree(project / "kept", folder)
    (problem,) = check_again(project, product)
    assert "they were beside others" in problem and problem.endswith("run `dvc repro -f -s evaluate@tiled`")
    evaluate(project, product, "tiled")
    assert check_again(project, product) == []


def seal_other_pictures(folder: Path) -> None:
    """Make every picture of an evaluation grey, and seal it again."""
    records = [json.loads(line) for line in (folder / "views.jsonl").read_text().splitlines()]
    for record in records:
        path = folder / f"views/{record['case_id']}.png"
        pixels = np.full_like(np.asarray(Image.open(path)), 128)
        Image.fromarray(pixels).save(path)
        record["output"] = digest_pixels(pixels)
    (folder / "views.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    index = json.loads((folder / "evaluation.json").read_text())
    index["evals"]["views"]["sha256"] = digest_file(folder / "views.jsonl")
    (folder / "evaluation.json").write_text(json.dumps(index))


def test_sound_tiles_have_no_seam_wherever_they_lie(project: Path, here: None) -> None:
    """A step that the reference makes at the same place, there without tiles, counted as the tiles' own."""
    edit(project, UPSCALER_FILE, " - 0.4 * x.mean((2, 3), keepdim=True)", "")
    shutil.rmtree(project / "evalsets/views")
    write_views(project / "evalsets/views", num=2, size=(128, 192))
    tiling = {"kind": "tiling", "tile": 64, "overlap": 0.125, "window": "hann"}
    _, tiled = run(project, make_upscaler({"tiled": [tiling]}))
    assert all(abs(record.scores["seam_levels"]) < 0.02 for record in tiled)
    assert all(record.scores["worst_seam_levels"] < 0.5 for record in tiled)


def test_a_candidate_of_another_architecture_is_judged_without_layers(project: Path, here: None) -> None:
    """Layers without a counterpart once ended the evaluation after its last picture."""
    edit(
        project,
        DETECTOR_FILE,
        "self.scale = nn.Conv2d(1, 1, 1)",
        "self.scale = nn.Conv2d(1, 1, 1)\n        if config.get('more'):\n            self.more = nn.Conv2d(1, 1, 1)",
    )
    folder = project / "detector/hot"
    shutil.copytree(project / "detector/squares", folder, dirs_exist_ok=True)
    edit(project, "detector/hot/config.json", "{", '{"more": true, ')
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"more.weight": torch.ones(1, 1, 1, 1), "more.bias": torch.zeros(1)}, folder / "model.safetensors"
    )
    product = make_detector({"hot": []})
    exact, other = run(project, product)
    assert [record.output for record in exact] == [record.output for record in other]
    assert read_notes(project, product, "hot")["layers"] == {}


def speed(low: float, median: float, high: float) -> dict[str, Any]:
    ratio = {"median": median, "low": low, "high": high}
    timed = {"baseline_ms": ratio, "candidate_ms": ratio, "ratio": ratio}
    return {
        "baseline": "torch float32",
        "difference": 1e-6,
        "tolerance": 1e-4,
        "timed": {"cpu": timed, "wall": timed},
        "clock": "cpu",
        "batch": 4,
        "rounds": 12,
    }


def rewrite_speed(root: Path, name: str, found: dict[str, Any] | None) -> None:
    """Replace what was timed in an evaluation's notes, and seal them again."""
    folder = root / "build/detector/evaluations" / name
    path, index = folder / "squares.json", json.loads((folder / "evaluation.json").read_text())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"speed": found, "total": found}))
    index["evals"]["squares"]["notes_sha256"] = digest_file(path)
    (folder / "evaluation.json").write_text(json.dumps(index))


def make_fast(**gate: Any) -> VisionProduct:
    """Return a product whose candidate differs by its memory format alone; 40 equal pictures prove 10 points."""
    tolerances = {"squares/ap": {"overall": 0.1}, "squares/finite_output_rate": {"overall": 0.1}}
    return make_detector(
        {"last": [LAST]}, gate={"alpha": 0.05, "on_inconclusive": "block", "tolerances": tolerances} | gate
    )


@pytest.mark.parametrize(
    ("found", "outcome", "said"),
    [
        pytest.param(speed(0.8, 0.85, 0.94), "pass", "", id="faster"),
        pytest.param(
            speed(0.8, 0.85, 0.95),
            "no gain",
            "channels_last: it takes 0.850 (0.800 to 0.950) of the CPU time of "
            "torch float32; a gain is surely below 0.95",
            id="not-surely-faster",
        ),
        pytest.param(speed(0.99, 1.0, 1.01), "no gain", "it takes 1.000 (0.990 to 1.010)", id="equal"),
        pytest.param(speed(1.1, 1.2, 1.3), "no gain", "it takes 1.200 (1.100 to 1.300)", id="slower"),
        pytest.param(
            speed(1, 1, 1) | {"timed": None, "difference": 0.3},
            "no gain",
            "channels_last: not timed, as its "
            "outputs differ by 0.3 of their standard deviation, more than the 0.0001 that rounding explains, from "
            "those of torch float32",
            id="other-outputs",
        ),
        pytest.param(
            speed(1, 1, 1) | {"timed": None, "difference": None},
            "no gain",
            "channels_last: not timed, as its outputs are not finite, or of other shapes than those of torch float32",
            id="not-finite",
        ),
        pytest.param(None, "no gain", "channels_last: not timed: it is not in force", id="not-in-force"),
    ],
)
def test_a_step_for_speed_alone_must_surely_gain(
    project: Path, here: None, found: dict[str, Any] | None, outcome: str, said: str
) -> None:
    product = make_fast()
    run(project, product)
    rewrite_speed(project, "last", found)
    compared = compare_release(product, project / "build/detector")
    (verdict,) = compared.judgement.verdicts
    assert verdict.outcome == outcome
    assert [reason for reason in list_said(verdict) if reason.startswith("no gain: ")] == (
        [f"no gain: {verdict.gain.why}"] if verdict.gain and outcome == "no gain" else []
    )
    assert verdict.gain is not None and said in verdict.gain.why
    assert compared.judgement.outcome == ("pass" if outcome == "pass" else "blocked")
    assert not said or f"  no gain      {verdict.gain.why}" in render_gate(compared.judgement)


def test_a_gain_in_cpu_time_that_users_wait_longer_for_is_none(project: Path, here: None) -> None:
    """Only the CPU's clock was asked, and a candidate that sleeps passed as faster."""
    product = make_fast()
    run(project, product)
    slow = {"median": 1.5, "low": 1.4, "high": 1.6}
    found = speed(0.5, 0.6, 0.7)
    rewrite_speed(
        project,
        "last",
        found | {"timed": found["timed"] | {"wall": dict.fromkeys(("baseline_ms", "candidate_ms", "ratio"), slow)}},
    )
    (verdict,) = compare_release(product, project / "build/detector").judgement.verdicts
    assert verdict.outcome == "no gain" and any(
        "it takes 1.500 (1.400 to 1.600) of the wall time of" in r for r in list_said(verdict)
    )


def test_a_step_without_a_compiler_is_left_off_and_gains_nothing(
    project: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate.shutil, "which", lambda _name: None)
    product = make_detector({"compiled": [COMPILED]}, gate=make_fast().gate.model_dump())
    run(project, product)
    built = read_network_candidate(project / "build/detector", "compiled", product)
    assert built.serving.compile_mode is None and built.fallbacks[0].layer == "(all)"
    (verdict,) = compare_release(product, project / "build/detector").judgement.verdicts
    assert verdict.outcome == "no gain"
    assert any(
        "not timed: torch.compile needs a C++ compiler on a CPU, and there is no g++" in reason
        for reason in list_said(verdict)
    )


@pytest.fixture
def judged(project: Path, here: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ReleaseComparison]:
    """Judge a release of one candidate with a memory format of its own, as stage compare does, in its folder."""
    run(project, make_fast())
    monkeypatch.chdir(project)

    def judge(found: dict[str, Any] | None, **gate: Any) -> ReleaseComparison:
        product = make_fast(**gate)
        params = parse_params(describe_project(product))
        monkeypatch.setattr(stages.gate, "load_params", lambda: params)
        rewrite_speed(project, "last", found)
        compared = compare_release(product, project / "build/detector")
        write_record(compared.judgement.path, compared.judgement)
        return compared

    return judge


def test_the_gate_blocks_what_gains_nothing_and_passes_what_does(
    judged: Callable[..., ReleaseComparison], capsys: pytest.CaptureFixture[str]
) -> None:
    judged(speed(1.0, 1.1, 1.2))
    assert stages.gate.main(["detector"]) == 1 and not Path("build/detector/gate.ok").exists()
    assert "last: no gain, blocks the release" in capsys.readouterr().out
    judged(speed(0.5, 0.6, 0.7))
    assert stages.gate.main(["detector"]) == 0 and Path("build/detector/gate.ok").exists()


def test_warn_lets_nothing_through_that_gains_nothing(judged: Callable[..., ReleaseComparison]) -> None:
    """An unproven metric made it inconclusive, and `warn` then let it go out without any gain."""
    tight = {"squares/ap": {"overall": 0.01}, "squares/finite_output_rate": {"overall": 0.1}}
    (verdict,) = judged(speed(1, 1, 1), on_inconclusive="warn", tolerances=tight).judgement.verdicts
    assert verdict.outcome == "inconclusive" and any(reason.startswith("no gain: ") for reason in list_said(verdict))
    assert stages.gate.main(["detector"]) == 1
    judged(speed(0.5, 0.6, 0.7), on_inconclusive="warn", tolerances=tight)
    assert stages.gate.main(["detector"]) == 0


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param({"outcome": "pass"}, id="outcome"),
        pytest.param({"outcome": "pass", "reasons": ()}, id="reason-removed"),
        pytest.param({"outcome": "pass", "reasons": (), "gain": None}, id="gain-removed"),
    ],
)
def test_a_verdict_without_a_gain_can_not_be_edited_into_a_pass(
    judged: Callable[..., ReleaseComparison], edits: dict[str, Any]
) -> None:
    judgement = judged(speed(1.0, 1.1, 1.2)).judgement
    check_outcomes(judgement)
    verdicts = tuple(verdict.model_copy(update=edits) for verdict in judgement.verdicts)
    forged = judgement.model_copy(update={"verdicts": verdicts, "outcome": "pass", "blocked_by": ()})
    write_record(judgement.path, Judgement.model_validate(forged.model_dump()))
    with pytest.raises(EvidenceError, match="last: the verdict contradicts the numbers or the policy beside it"):
        stages.gate.main(["detector"])


def test_the_gate_refuses_an_adapter_that_was_edited_after_it_was_judged(
    judged: Callable[..., ReleaseComparison], project: Path
) -> None:
    """It lies outside of the checkpoint's folder, whose files alone were hashed again."""
    judged(speed(0.5, 0.6, 0.7))
    edit(project, DETECTOR_FILE, '"score": heat', '"score": 1 - heat')
    with pytest.raises(EvidenceError, match="adapter.py: expected the adapter that was judged"):
        stages.gate.main(["detector"])


NUM_SCENES = 6


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped networks, and a few pictures of theirs."""
    root = tmp_path_factory.mktemp("shipped")
    for name in ("people", "people-hard", "upscaler"):
        shutil.copytree(ROOT / "models" / name, root / "models" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, places in (("scenes", range(0, 200, 200 // NUM_SCENES)), ("panoramas", (0,))):
        cases = [json.loads(line) for line in (ROOT / "evalsets" / name / "cases.jsonl").read_text().splitlines()]
        chosen = [cases[i] for i in places][:NUM_SCENES]
        for path in (case[key] for case in chosen for key in ("image", "target") if key in case):
            (root / "evalsets" / name / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "evalsets" / name / path, root / "evalsets" / name / path)
        write_evalset(root / "evalsets" / name, "detection" if name == "scenes" else "upscaling", chosen)
    return root


def take(name: str, *candidates: str) -> VisionProduct:
    """Return a shipped product with some of its candidates and without its calibration images."""
    product = get_product(load_params(ROOT / "params.yaml"), name, kind=VisionProduct)
    names = (product.reference, *candidates)
    return product.model_copy(
        update={
            "candidates": {kept: product.candidates[kept] for kept in names},
            "release": list(candidates),
            "calibration_images": None,
            "resources": product.resources.model_copy(update={"num_workers": 1}),
        }
    )


def read_shipped(folder: Path) -> tuple[tuple[Any, ...], np.ndarray]:
    """Return an evalset's cases and their pictures."""
    cases = load_evalset(folder).cases
    return cases, np.stack([read_picture(folder / case.image, case.sha256) for case in cases])


def test_the_shipped_detector_is_judged_by_what_its_own_code_finds(shipped: Path, here: None) -> None:
    from models.people.detector import detect, open_detector

    product = take("people", "winograd-f43-fp16", "winograd-calibrated")
    check_network(product, shipped)
    exact, winograd, calibrated = run(shipped, product)
    _, pixels = read_shipped(shipped / "evalsets/scenes")
    found = detect(open_detector(shipped / "models/people-hard"), pixels)
    for record, own in zip(exact, found, strict=True):
        results = json.loads(record.output)
        assert np.allclose(np.array([r["bbox"] for r in results]).reshape(-1, 4), own.boxes, atol=1e-2)
        assert np.allclose([r["score"] for r in results], own.scores, atol=1e-4)
    assert sum(record.scores["found_50"] for record in exact) > 0
    assert all(record.scores["finite"] for side in (exact, calibrated) for record in side)
    assert not any(record.scores["finite"] for record in winograd), "its branch of small people overflows"
    assert [record.output for record in winograd] != [record.output for record in exact]
    layers = read_notes(shipped, product, "winograd-f43-fp16")["layers"]
    assert max(layer["relative_error"] for layer in layers.values()) > 1e-4
    built = read_network_candidate(shipped / "build/people", "winograd-f43-fp16", product)
    assert {c.format for c in built.coverage} == {"winograd_f43 float16", "direct float16"} and built.fallbacks
    compared = compare_release(product, shipped / "build/people")
    assert all(verdict.outcome != "pass" for verdict in compared.judgement.verdicts), "6 pictures prove nothing"
    assert "winograd-f43-fp16" in render_report(compared)


def test_the_shipped_upscaler_writes_the_pictures_of_its_own_code(shipped: Path, here: None) -> None:
    from models.upscaler.upscaler import open_upscaler, upscale

    product = take("upscaler", "tiled", "tiled-hann")
    check_network(product, shipped)
    whole, tiled, blended = run(shipped, product)
    cases, pixels = read_shipped(shipped / "evalsets/panoramas")
    for case, own in zip(cases, upscale(open_upscaler(shipped / "models/upscaler"), pixels), strict=True):
        with Image.open(shipped / f"build/upscaler/evaluations/upscaler/panoramas/{case.id}.png") as picture:
            assert np.abs(np.asarray(picture).astype(int) - own).max() <= 1
    assert all(record.scores["psnr_db"] > 20 and record.scores["seam_levels"] == 0 for record in whole)
    cut, soft = (sum(record.scores["seam_levels"] for record in side) for side in (tiled, blended))
    assert cut > soft + 0.5


SLEEPY = (
    DETECTOR.replace("import torch\n", "import time\n\nimport torch\n")
    .replace("        return self.pool", "        time.sleep(self.wait)\n        return self.pool")
    .replace("        self.blur =", "        self.wait = config.get('wait', 0)\n        self.blur =")
)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("steps", [[], [LAST]], ids=["no-step", "a-step"])
def test_another_checkpoint_that_sleeps_is_slower_than_the_reference(project: Path, steps: list[Any]) -> None:
    """It was timed beside its own weights, which sleep as long, or without a step not at all: it passed."""
    (project / DETECTOR_FILE).write_text(SLEEPY)
    (project / "detector/hot/config.json").write_text(json.dumps({"cell": 8, "least": 0.3, "wait": 0.2}))
    gate = describe_detector()["gate"] | {"max_slowdown": 0.25}
    product = make_detector({"hot": steps}, gate=gate)
    run(project, product)
    compared = compare_release(product, project / product.build)
    verdict = compared.judgement.verdicts[0]
    assert verdict.outcome == "fail" and verdict.total is not None and verdict.total.median > 5
    assert any(reason.startswith("fail: speed: ") for reason in list_said(verdict))
    check_outcomes(compared.judgement)
