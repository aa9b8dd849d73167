"""Networks that are .onnx files, from params.yaml's words to a verdict: run by ONNX Runtime, judged as any other."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import NodeProto
from onnx.helper import make_node
from PIL import Image

from evalsets.seal import seal
from pipeline.errors import CheckpointError, QuantgateError, SettingsError
from pipeline.evalsets.pictures import measure_picture
from pipeline.products.params import get_product, parse_params
from pipeline.products.vision import VisionKind, preflight, workers
from pipeline.products.vision.adapters import load_adapter
from pipeline.products.vision.evaluate import open_replica
from pipeline.products.vision.loading import load_network
from pipeline.products.vision.onnx_files import open_session
from pipeline.products.vision.onnx_module import OnnxModule
from pipeline.products.vision.preflight import check_network
from pipeline.products.vision.serving import read_network_candidate, run_plainly
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.digests import digest_file
from pipeline.running.environment import Gpu, read_machine
from pipeline.running.shards import Shard
from pipeline.settings.yaml_files import parse_yaml
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.tiny_networks import (
    CELL,
    DETECTOR,
    NUM_PICTURES,
    SIDE,
    describe_detector,
    describe_upscaler,
    write_project,
)
from tests.fakes.tiny_onnx import FLOAT, FLOAT16, INT64, UINT8, Side, make_weight, write_model
from tests.fakes.workers_here import start_here
from tests.integration.test_networks import build, edit, evaluate, list_results, read_notes, run, say

ADAPTER = "detector/adapter.py"
FILE = "detector/onnx/model.onnx"
FREE: Sequence[Side] = ("n", 1, "rows", "columns")
LARGEST = 255  # of a picture's levels


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = write_project(tmp_path / "project")
    export(root)
    return root


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate without other processes, which take seconds to start."""

    monkeypatch.setattr(workers, "start_workers", start_here)


def make_product(
    *candidates: str, reference: str = "squares", max_slowdown: float | None = None, **changes: Any
) -> VisionProduct:
    """Return a detector whose candidates lie in the folders `detector/<name>`; 40 pictures can prove its tolerances."""
    given = describe_detector({name: [] for name in candidates}, **changes)
    tolerances = given["gate"]["tolerances"] | {"squares/ap": {"overall": 0.1}, "squares/ap_small": {"overall": 0.1}}
    given["gate"] |= {"tolerances": tolerances, "max_slowdown": max_slowdown}
    given |= {"reference": reference, "release": list(candidates)}
    given["candidates"] = {
        name: {"checkpoint": f"detector/{name}", "steps": []} for name in dict.fromkeys((reference, *candidates))
    }
    return VisionProduct.model_validate(given)


def export(
    root: Path,
    name: str = "onnx",
    *,
    checkpoint: str = "detector/squares",
    adapter: str = ADAPTER,
    channels: int = 1,
    **options: Any,
) -> Path:
    """Write a module as an .onnx file by torch's own exporter, and its config beside it."""
    path = root / "detector" / name / "model.onnx"
    path.parent.mkdir()
    shutil.copy(root / checkpoint / "config.json", path.parent)
    network = load_network(root / checkpoint, load_adapter(root / adapter), run_plainly(make_product("onnx")))
    axes = {"images": {0: "n", 2: "rows", 3: "columns"}}
    given = {"input_names": ["images"], "output_names": ["heat"], "dynamic_axes": axes, "dynamo": False} | options
    with warnings.catch_warnings():  # the exporter that needs onnx alone is said to be old
        warnings.simplefilter("ignore")
        torch.onnx.export(network.module, (torch.zeros(1, channels, SIDE, SIDE),), path, **given)
    return path


def write_squares(path: Path, *, step: float | None = None, dtype: str = "float32", gain: float = 1.0) -> Path:
    """Write the detector's operations by hand.

    Args:
        path: of the .onnx file.
        step: of INT8 inputs, in levels; None: they stay float.
        dtype: of input, weights and output.
        gain: of the first convolution, which the last one takes back.
    """
    (path.parent / "config.json").parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "config.json").write_text(json.dumps({"cell": CELL, "least": 0.3}))
    blur = np.full((1, 1, 3, 3), 0.05)
    blur[..., 1, 1] = 0.6
    weights = [
        make_weight("blur", (blur * gain).astype(dtype)),
        make_weight("scale", np.full((1, 1, 1, 1), 1 / LARGEST / gain, dtype)),
    ]
    nodes, first = [], "images"
    if step is not None:
        weights += [make_weight("step", np.array(step, np.float32)), make_weight("zero", np.array(0, np.uint8))]
        nodes = [make_node("QuantizeLinear", ["images", "step", "zero"], ["levels"])]
        nodes += [make_node("DequantizeLinear", ["levels", "step", "zero"], [first := "rounded"])]
    nodes += [
        make_node("Conv", [first, "blur"], ["blurred"], pads=[1, 1, 1, 1]),
        make_node("Conv", ["blurred", "scale"], ["scaled"]),
        make_node("AveragePool", ["scaled"], ["heat"], kernel_shape=[CELL, CELL], strides=[CELL, CELL]),
    ]
    kind = FLOAT16 if dtype == "float16" else FLOAT
    return write_model(path, nodes, inputs={"images": (kind, FREE)}, outputs={"heat": (kind, FREE)}, weights=weights)


def judge(root: Path, product: VisionProduct) -> tuple[str, str]:
    """Evaluate all candidates and judge the one that is released: its outcome, and what is said of it."""
    run(root, product)
    (verdict,) = compare_release(product, root / product.build).judgement.verdicts
    return verdict.outcome, "\n".join(list_said(verdict))


def read_facts(root: Path, product: VisionProduct, name: str) -> dict[str, Any]:
    text = (root / product.build / "evaluations" / name / "evaluation.json").read_text()
    return dict(json.loads(text)["served_by"])


def test_an_exported_detector_scores_as_its_module_does(project: Path, here: None) -> None:
    product = make_product("onnx")
    assert check_network(product, project) == []
    plain, served = run(project, product)
    for one, other in zip(plain, served, strict=True):
        ours, theirs = (json.loads(record.output) for record in (one, other))
        assert [r["bbox"] for r in ours] == [r["bbox"] for r in theirs] != []
        np.testing.assert_allclose([r["score"] for r in ours], [r["score"] for r in theirs], atol=1e-6)
        assert one.scores == other.scores
    assert {one.fingerprint for one in plain}.isdisjoint(one.fingerprint for one in served)
    compared = compare_release(product, project / product.build)
    (verdict,) = compared.judgement.verdicts
    assert verdict.outcome == "pass", list_said(verdict)
    assert "| `onnx` | onnxruntime | " in render_report(compared) and "| `squares` | torch | " in render_report(
        compared
    )


def test_shards_make_the_results_of_one_run(project: Path, here: None) -> None:
    product, folder = make_product("onnx"), project / "build/detector"
    run(project, product, "onnx")
    alone = list_results(project, product, "onnx")
    with open_replica(read_network_candidate(folder, "onnx", product), product, root=project, build=folder) as replica:
        assert sum(replica.run(Shard(number, 2)) for number in (1, 2)) == NUM_PICTURES
    evaluate(project, product, "onnx")
    assert list_results(project, product, "onnx") == alone


def test_the_fingerprint_holds_what_ran_and_how(project: Path, here: None) -> None:
    product = make_product("onnx", serving={"batch_size": 4, "num_threads": 2})
    run(project, product)
    facts = read_facts(project, product, "onnx")
    assert facts["engine"] == {
        "providers": ["CPUExecutionProvider"],
        "graph_optimization_level": "ORT_ENABLE_ALL",
        "execution_mode": "ORT_SEQUENTIAL",
        "intra_op_num_threads": 2,
        "inter_op_num_threads": 1,
    }
    assert facts["libraries"]["onnxruntime"] == onnxruntime.__version__
    assert (facts["serving"]["engine"], facts["serving"]["num_threads"]) == ("onnxruntime", 2)
    plain = read_facts(project, product, "squares")
    assert "engine" not in plain and "onnxruntime" not in plain["libraries"]


def test_both_may_be_files_and_then_the_adapter_builds_no_module(project: Path, here: None) -> None:
    write_squares(project / "detector/int8/model.onnx", step=1.0)
    (project / ADAPTER).write_text(DETECTOR[DETECTOR.index("def preprocess") :])
    product = make_product("int8", reference="onnx")
    assert check_network(product, project) == []
    outcome, said = judge(project, product)
    assert outcome == "pass", said
    with pytest.raises(SettingsError, match=r"adapter: expected build, preprocess, postprocess in .*, found no build"):
        check_network(make_product("int8"), project)


def test_a_module_may_be_judged_beside_a_file(project: Path, here: None) -> None:
    outcome, said = judge(project, make_product("squares", reference="onnx", max_slowdown=10))
    assert outcome == "pass", said


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param({"step": 300.0}, "squares/ap", id="range"),  # dim squares round to 0
        pytest.param({"gain": 1.5e36}, "squares/finite_output_rate", id="overflow"),
    ],
)
def test_a_damaged_file_loses_and_is_judged_so(project: Path, here: None, damage: dict[str, Any], said: str) -> None:
    write_squares(project / "detector/damaged/model.onnx", **damage)
    product = make_product("damaged")
    assert check_network(product, project) == []
    outcome, reasons = judge(project, product)
    assert outcome == "fail" and said in reasons


def test_a_float16_file_is_given_float16(project: Path, here: None) -> None:
    write_squares(project / "detector/half/model.onnx", dtype="float16")
    product = make_product("half")
    outcome, said = judge(project, product)
    assert outcome == "pass", said
    assert build(project, product, "half").checkpoint.dtype == "float16"


def test_processes_find_byte_for_byte_what_one_does(project: Path, request: pytest.FixtureRequest) -> None:
    changes: dict[str, Any] = {"resources": {"num_workers": 2}}
    run(project, product := make_product("onnx", **changes), "onnx")
    first = list_results(project, product, "onnx")
    request.getfixturevalue("here")
    run(project, make_product("onnx"), "onnx")
    assert list_results(project, product, "onnx") == first and len(first) >= 2


def test_a_stopped_evaluation_goes_on(project: Path, here: None) -> None:
    """The journal's key holds the file and what runs it: pictures of before are taken, each once."""
    calls = project / "calls.txt"
    counted = f"\n    open({str(calls)!r}, 'a').write('call\\n')\n    "
    stop = (
        f"if open({str(calls)!r}).read().count('call') == 6:\n        raise RuntimeError('stopped')\n    cell = config"
    )
    edit(project, ADAPTER, "\n    cell = config", counted + stop)
    product = make_product("onnx")
    build(project, product, "onnx")
    with pytest.raises(QuantgateError, match="stopped"):
        evaluate(project, product, "onnx")
    journal = project / product.build / "journal/onnx/squares.jsonl"
    num_done, num_calls = journal.read_text().count("\n"), len(calls.read_text().splitlines())
    assert 0 < num_done < NUM_PICTURES and num_done % 4 == 0
    assert len(evaluate(project, product, "onnx")) == NUM_PICTURES
    assert len(calls.read_text().splitlines()) - num_calls == (NUM_PICTURES - num_done) // 4


def test_its_time_is_told_beside_the_reference(project: Path, here: None) -> None:
    product = make_product("onnx", max_slowdown=10)
    outcome, said = judge(project, product)
    assert outcome == "pass", said
    notes = read_notes(project, product, "onnx")
    assert notes["total"]["baseline"] == "the reference, torch float32"
    assert notes["total"]["timed"]["cpu"]["candidate_ms"]["median"] > 0
    assert (notes["layers"], notes["int8"], notes["peak_mib"]) == ({}, None, None)


def test_rows_of_any_number_come_to_the_adapter_by_name(project: Path, here: None) -> None:
    """A file that suppresses boxes itself returns as many rows as there are, over all pictures."""
    nodes = [
        make_node("AveragePool", ["images"], ["heat"], kernel_shape=[CELL, CELL], strides=[CELL, CELL]),
        make_node("Greater", ["heat", "least"], ["is_there"]),
        make_node("NonZero", ["is_there"], ["places"]),
    ]
    write_model(
        project / "detector/rows/model.onnx",
        nodes,
        inputs={"images": (FLOAT, FREE)},
        outputs={"heat": (FLOAT, FREE), "places": (INT64, (4, "found"))},
        weights=[make_weight("least", np.array(0.3 * LARGEST, np.float32))],
    )
    (project / ADAPTER).write_text(
        DETECTOR[DETECTOR.index("def preprocess") : DETECTOR.index("def postprocess")]
        + """def postprocess(outputs, config):
    assert config == {}
    found = [[] for _ in outputs["heat"]]
    for image, _, row, column in outputs["places"].T.tolist():
        score = outputs["heat"][image, 0, row, column].item()
        found[image].append({"bbox": [column * 8, row * 8, 8, 8], "score": score, "category_id": 1})
    return found
"""
    )
    (records,) = run(project, make_product("rows", reference="onnx"), "rows")
    assert sum(len(json.loads(record.output)) for record in records) == sum(
        record.scores["objects"] for record in records
    )


def test_fixed_sides_serve_pictures_of_any_size(project: Path, here: None) -> None:
    """The adapter resizes, and scales boxes back: no module of its own is there to do it."""
    shutil.rmtree(project / "detector/onnx")
    path = export(project, dynamic_axes={"images": {0: "n"}, "heat": {0: "n"}})
    assert onnxruntime.InferenceSession(path).get_inputs()[0].shape == ["n", 1, SIDE, SIDE]
    for picture in (project / "evalsets/squares/images").iterdir():
        with Image.open(picture) as opened:
            half = opened.resize((SIDE // 2, SIDE // 2), Image.Resampling.BOX)
        half.save(picture)
    halve_cases(project / "evalsets/squares")
    text = (project / ADAPTER).read_text()
    text = text.replace(
        "float().mean(1, keepdim=True)", "float().mean(1, keepdim=True).repeat_interleave(2, 2).repeat_interleave(2, 3)"
    )
    text = text.replace("postprocess(outputs, config)", "postprocess(outputs, config, size)")
    text = text.replace('cell = config["cell"]', 'cell = config["cell"] * size[0] // 32')
    (project / ADAPTER).write_text(text)
    product = make_product("onnx")
    outcome, said = judge(project, product)
    assert outcome == "pass", said
    found = evaluate(project, product, "onnx")
    assert sum(record.scores["found"] for record in found) == sum(record.scores["objects"] for record in found)


def halve_cases(folder: Path) -> None:
    """Halve the boxes of an evalset whose pictures were halved, and seal it."""
    cases = []
    for line in (folder / "cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        case["sha256"] = digest_file(folder / case["image"])
        for annotation in case["annotations"]:
            annotation["bbox"] = [side // 2 for side in annotation["bbox"]]
            annotation["area"] //= 4
        cases.append(case)
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    seal(folder)


def test_an_upscaler_gives_the_pictures_of_its_module(project: Path, here: None) -> None:
    export(project, "views", checkpoint="upscaler/doubled", adapter="upscaler/adapter.py", channels=3)
    given = describe_upscaler({"views": []})
    given["candidates"]["views"]["checkpoint"] = "detector/views"
    product = VisionProduct.model_validate(given)
    assert check_network(product, project) == []
    plain, served = run(project, product)
    for one, other in zip(plain, served, strict=True):
        assert other.scores["psnr_db"] == pytest.approx(one.scores["psnr_db"], abs=0.01)


def spoil(text: bytes | int) -> Callable[[Path], Any]:
    """Return what writes a file's content anew, or cuts so many bytes off."""
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else path.read_bytes()[:-text])


def rewrite(
    *,
    takes: dict[str, tuple[int, Sequence[Side]]] | None = None,
    gives: tuple[int, Sequence[Side]] = (FLOAT, FREE),
    node: NodeProto | None = None,
    outside: bytes | None = None,
    **changes: Any,
) -> Callable[[Path], Any]:
    """Return what writes a file of one convolution in place of another; `outside`: what its external data holds."""

    def write(path: Path) -> None:
        data = path.with_name("weights.bin") if outside is not None else None
        weight = make_weight("w", np.ones((1, 1, 3, 3), np.float32), file=data)
        inputs = takes or {"images": (FLOAT, FREE)}
        nodes = [node or make_node("Conv", ["images", "w"], ["heat"])]
        write_model(path, nodes, inputs=inputs, outputs={"heat": gives}, weights=[weight], **changes)
        if data is not None:
            data.write_bytes(outside or b"")
            if not outside:
                data.unlink()

    return write


NMS = make_node("Nms", ["images"], ["heat"], domain="acme")
CAST = make_node("Cast", ["images"], ["heat"], to=8)  # to text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(spoil(40), "can't load it (", id="cut"),
        pytest.param(spoil(b""), "can't load it (0 bytes): ", id="empty"),
        pytest.param(spoil(b"version https://git-lfs"), "can't load it (23 bytes): ", id="pointer"),
        pytest.param(rewrite(outside=b""), "copy it again with the files of its external data", id="no-data"),
        pytest.param(rewrite(outside=b"12"), "copy it again with the files of its external data", id="cut-data"),
        pytest.param(rewrite(opset=99), "or export it for this version", id="opset"),
        pytest.param(rewrite(node=NMS, domains=["acme"]), "acme:Nms", id="custom"),
        pytest.param(rewrite(node=make_node("Nms", ["images"], ["heat"])), "This is an invalid model", id="unknown"),
        pytest.param(
            rewrite(takes={"images": (FLOAT, (1, 1, "rows", "columns"))}),
            "input 'images': expected any number of pictures, as serving.batch_size is 4 and a last batch is smaller, "
            "got 1; export it with a free (dynamic) first axis, or set serving.batch_size to 1",
            id="batch",
        ),
        pytest.param(
            rewrite(takes={"images": (FLOAT, (4, 1, "rows", "columns"))}),
            "a last batch is smaller, got 4; export it with a free (dynamic) first axis",
            id="batch-of-4",
        ),
        pytest.param(
            rewrite(takes={"images": (FLOAT, FREE), "sizes": (INT64, ("n", 2))}),
            "expected one input, the pictures, found 'images', 'sizes'; export",
            id="inputs",
        ),
        pytest.param(
            rewrite(takes={"images": (UINT8, FREE)}, node=make_node("Cast", ["images"], ["heat"], to=1)),
            "input 'images': expected float32 or float16, got tensor(uint8); export",
            id="uint8",
        ),
        pytest.param(
            rewrite(takes={"images": (FLOAT, ("n", 3))}, node=make_node("Identity", ["images"], ["heat"])),
            "input 'images': expected the axes images, channels, rows, columns, got ['n', 3]; export it so",
            id="axes",
        ),
        pytest.param(
            rewrite(node=CAST, gives=(8, FREE)),
            "output 'heat': expected a tensor of numbers, got tensor(string); export it so",
            id="text",
        ),
        pytest.param(
            lambda path: shutil.copy(path, path.with_name("model-int8.onnx")),
            "expected one .onnx file, found 'model-int8.onnx', 'model.onnx'; give each a folder of its own",
            id="two",
        ),
        pytest.param(
            lambda path: shutil.copy(path.parents[1] / "squares/model.safetensors", path.parent),
            "expected model.safetensors or an .onnx file, found both, 'model.onnx' too",
            id="both",
        ),
        pytest.param(
            lambda path: path.rename(path.with_suffix(".pb")),
            "expected model.safetensors or model.safetensors.index.json, found neither",
            id="no-file",
        ),
    ],
)
def test_what_a_file_tells_is_refused_before_work(project: Path, damage: Callable[[Path], Any], said: str) -> None:
    damage(project / FILE)
    product = make_product("onnx")
    with pytest.raises(SettingsError) as caught:
        check_network(product, project)
    assert say(caught).startswith("candidates.onnx.checkpoint: ") and said in say(caught), say(caught)
    with pytest.raises(CheckpointError) as built:
        build(project, product, "onnx")
    assert "\n" not in str(built.value)


def test_the_file_itself_is_no_folder(project: Path) -> None:
    given = make_product("onnx").model_dump(mode="json")
    given["candidates"]["onnx"]["checkpoint"] = FILE
    product = VisionProduct.model_validate(given)
    with pytest.raises(SettingsError) as caught:
        check_network(product, project)
    assert "expected the folder of an .onnx file, got the file; move it with its external data" in say(caught)


@pytest.mark.parametrize("kind", ["precision", "channels_last", "compile", "quantize", "conv_policy", "tiling"])
def test_a_step_is_refused_by_name(project: Path, kind: str) -> None:
    steps: dict[str, dict[str, Any]] = {
        "precision": {"dtype": "float16"},
        "compile": {"mode": "default"},
        "quantize": {"dtype": "int8", "num_pictures": 1},
        "conv_policy": {"algorithm": "direct", "dtype": "float16"},
        "tiling": {"tile": 16, "overlap": 0.0, "window": "none"},
    }
    given = make_product("onnx").model_dump(mode="json")
    given["candidates"]["onnx"]["steps"] = [{"kind": kind} | steps.get(kind, {})]
    product = VisionProduct.model_validate(given)
    said = (
        f"candidates.onnx.steps.0: expected no step with an .onnx file, which ONNX Runtime runs as it is, got {kind};"
    )
    with pytest.raises(SettingsError) as caught:
        check_network(product, project)
    assert say(caught).startswith(said)
    with pytest.raises(SettingsError) as built:
        build(project, product, "onnx")
    assert say(built).startswith(said)


def test_sides_that_the_file_does_not_take_are_told_when_it_is_built(project: Path) -> None:
    rewrite(takes={"images": (FLOAT, ("n", 1, 16, 16))})(project / FILE)
    product = make_product("onnx")
    assert check_network(product, project) == [], "only the adapter knows what it makes of a picture"
    with pytest.raises(QuantgateError) as caught:
        build(project, product, "onnx")
    assert say(caught).endswith(
        "model.onnx: input 'images': expected (images, 1, 16, 16), got (1, 1, 32, 32); make pictures so in "
        "preprocess(), or export it with free (dynamic) sides"
    )


def test_a_batch_that_an_operation_can_not_take_is_told_at_once(project: Path, here: None) -> None:
    """An exporter that traces one picture may write its number into the file, though the input says any."""
    path = project / FILE
    write_model(
        path,
        [make_node("Reshape", ["images", "shape"], ["heat"])],
        inputs={"images": (FLOAT, FREE)},
        outputs={"heat": (FLOAT, FREE)},
        weights=[make_weight("shape", np.array([1, 1, SIDE, SIDE]))],
    )
    build(project, product := make_product("onnx"), "onnx")
    with pytest.raises(QuantgateError) as caught:
        evaluate(project, product, "onnx")
    assert "model.onnx: ONNX Runtime failed on an input of shape (4, 1, 32, 32): " in say(caught)
    assert "Non-zero status code returned while" in say(
        caught
    ) and "; where one picture alone runs, export it for any number; the batch" in say(caught)


def test_one_picture_at_a_time_is_served_so(project: Path, here: None) -> None:
    """Many files are exported for one picture."""
    shutil.rmtree(project / "detector/onnx")
    export(project, dynamic_axes=None)
    product = make_product("onnx", serving={"batch_size": 1, "num_threads": 1})
    assert check_network(product, project) == []
    outcome, said = judge(project, product)
    assert outcome == "pass", said


def test_external_data_is_part_of_what_is_judged(project: Path, here: None) -> None:
    rewrite(outside=np.full((1, 1, 3, 3), 1e-3, np.float32).tobytes())(project / FILE)
    product = make_product("onnx")
    built = build(project, product, "onnx")
    assert set(built.checkpoint.files) == {"config.json", "model.onnx", "weights.bin"}
    assert built.checkpoint.num_bytes == (project / FILE).stat().st_size + 36
    (project / "detector/onnx/weights.bin").write_bytes(bytes(36))
    with pytest.raises(QuantgateError, match=r"was built of, weights\.bin differs"):
        evaluate(project, product, "onnx")


def test_another_provider_than_was_asked_for_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime falls back without a word: numbers would be those of other kernels than serve."""
    session = onnxruntime.InferenceSession
    monkeypatch.setattr(session, "get_providers", lambda _: ["DnnlExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(CheckpointError) as caught:
        open_session(project / FILE, num_threads=1)
    assert "expected to run by CPUExecutionProvider alone, ONNX Runtime runs it by DnnlExecutionProvider" in say(caught)


def test_without_onnx_runtime_it_says_what_to_install(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(SettingsError) as caught:
        check_network(make_product("onnx"), project)
    assert say(caught).endswith("found no onnxruntime; install 'onnxruntime>=1.32,<1.33'")


def test_a_gpu_is_refused_as_all_else_would_run_there(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(name="NVIDIA H100", driver="580", memory_mib=81559)
    machine = read_machine().model_copy(update={"gpus": (gpu,), "torch_build": "cuda 13.0"})
    product = make_product("onnx")
    with pytest.raises(SettingsError) as caught:
        VisionKind().check(product, project, machine, is_local=True)
    assert say(caught).startswith("candidates.onnx.checkpoint: ") and say(caught).endswith("CUDA_VISIBLE_DEVICES=-1")
    hidden = machine.model_copy(update={"gpus_hidden": True})
    assert VisionKind().check(product, project, hidden, is_local=True) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(CheckpointError, match=r"model\.onnx: expected no GPU, as \.onnx files are run on the CPU"):
        OnnxModule(project / FILE, num_threads=1, batch_size=1)


def test_another_onnx_runtime_makes_its_candidates_stale(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product = make_product("onnx")
    beside = make_product("squares", reference="onnx")  # timed beside the file
    before = [VisionKind().list_inputs(one, project) for one in (product, beside)]
    monkeypatch.setattr(preflight, "read_version", lambda: "2.0")
    after = [VisionKind().list_inputs(one, project) for one in (product, beside)]
    for old, new in zip(before, after, strict=True):
        assert {name for name, watched in new.optimize.items() if watched != old.optimize[name]} == {"onnx"}
    assert before[0].evaluate == after[0].evaluate and before[1].evaluate != after[1].evaluate


@pytest.mark.parametrize("side", [256, 320])
def test_what_it_starts_with_is_taken_by_all_checks(project: Path, side: int) -> None:
    """A file that takes one size gets example pictures of it."""
    if side == 256:
        rewrite(takes={"images": (FLOAT, (1, 1, side, side))})(project / FILE)
    start = VisionKind().start_product(
        "cam", "detector/onnx", project, {"task": "detection", "adapter": "detector/adapter.py"}
    )
    (warning,) = start.warnings
    assert warning.startswith("cam-again: it is the reference once more; name the folder of the .onnx file")
    for path, content in start.files.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_bytes(content)
    params = parse_params({"products": parse_yaml(start.section), "candidates": parse_yaml(start.candidates)})
    assert check_network(product := get_product(params, "cam", kind=VisionProduct), project) == []
    assert {measure_picture(path) for path in project.glob("evalsets/cam-pictures/images/*")} == {(side, side)}
    assert build(project, product, "cam-again").serving.engine == "onnxruntime"
