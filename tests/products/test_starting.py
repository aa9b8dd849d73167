"""`quantgate init`: what a new user would trip over, and what must not be lost of a project."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx.helper import make_node
from PIL import Image

from pipeline.__main__ import main
from pipeline.errors import CheckpointError, QuantgateError, SettingsError
from pipeline.evalsets.examples import check_own_cases
from pipeline.gate.preflight import check_gates
from pipeline.gate.suite_sizes import load_evalsets, plan_product
from pipeline.products import starting
from pipeline.products.params import load_params
from pipeline.products.starting import init_product
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.start import choose_step
from pipeline.records.digests import digest_file
from pipeline.running.environment import read_machine
from pipeline.settings.yaml_blocks import add_entry, remove_entries
from pipeline.settings.yaml_files import read_yaml
from tests.fakes.hollow_llama import SHAPES, write_hollow_llama
from tests.fakes.tiny_architectures import write_tiny_model
from tests.fakes.tiny_onnx import FLOAT, make_weight, write_model
from tests.fakes.tiny_transformers import write_tiny_flux
from tests.paths import ROOT

FILES = ("params.yaml", "pyproject.toml", "dvc.lock", "dvc.yaml")
SHIPPED = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["quantgate"]["shipped"])
UPSCALER = {"task": "upscaling"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What `init` reads of a clone, under git."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "models/agent", tmp_path / "models/agent")
    for name in ("upscaler", "people", "product-shots", "product-shots-clip"):
        (tmp_path / "models" / name).symlink_to(ROOT / "models" / name)
    shutil.copytree(ROOT / "stages", tmp_path / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("release", "reports", "metrics"):
        for name in SHIPPED:
            (tmp_path / folder / name).mkdir(parents=True)
            (tmp_path / folder / name / "kept.txt").write_text(name)
    run = ("git", "-c", "user.name=test", "-c", "user.email=test@example.org")
    for words in (
        ("init", "--quiet"),
        ("add", *FILES, "release", "reports", "metrics"),
        ("commit", "--quiet", "-m", "clone"),
    ):
        subprocess.run([*run, *words], cwd=tmp_path, check=True)
    return tmp_path


def snapshot(root: Path) -> dict[Path, str]:
    """Return every file, but git's own, and what is in it."""
    return {path: digest_file(path) for path in root.rglob("*") if path.is_file() and ".git" not in path.parts}


def drop_template(root: Path) -> str:
    """Make the agent a model that can't chat."""
    (root / "models/agent").rename(root / "models/base")
    (root / "models/base/chat_template.jinja").unlink()
    return "models/base"


def write_schnell(root: Path) -> str:
    """Write a pipeline that takes no guidance."""
    write_tiny_flux(root / "models/schnell", guidance_embeds=False)
    return "models/schnell"


@pytest.mark.parametrize(
    ("kind", "checkpoint", "options", "evals"),
    [
        ("text", "models/agent", {}, {"calls": "tool_calls", "documents": "perplexity"}),
        ("text", drop_template, {}, {"choices": "harness", "documents": "perplexity"}),
        ("vision", "models/upscaler", UPSCALER, {"pictures": "upscaling"}),
        ("vision", "models/people", {"task": "detection"}, {"pictures": "detection"}),
        ("images", "models/product-shots", {"clip": "models/product-shots-clip"}, {"prompts": "images"}),
        ("images", write_schnell, {"clip": "models/product-shots-clip"}, {"prompts": "images"}),
    ],
    ids=["chat", "base", "upscaler", "detector", "images", "images-flux"],
)
def test_what_a_kind_starts_with_is_taken_by_all_checks(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    checkpoint: str | Callable[[Path], str],
    options: dict[str, str],
    evals: dict[str, str],
) -> None:
    """Nine commands failed before a first verdict: each check that a stage makes must hold of what is written."""
    monkeypatch.chdir(project)
    folder = checkpoint if isinstance(checkpoint, str) else checkpoint(project)
    before = Path("params.yaml").read_text()
    init_product("bot", kind, folder, options, root=Path())
    product = load_params().products["bot"]
    assert {name: own.kind for name, own in product.evals.items()} == evals
    with pytest.raises(SettingsError, match="expected cases of your own before a release") as caught:
        check_own_cases(product, Path())
    assert check_gates([product], Path()) == [f"bot: {caught.value}"], "a warning, as the run goes on to a verdict"
    changes = difflib.ndiff(before.splitlines(), Path("params.yaml").read_text().splitlines())
    assert not [line for line in changes if line.startswith("-")]
    rows = plan_product(product, load_evalsets(product, Path()), Path())
    assert all(row.power is None or row.power >= 0.8 for row in rows), "a user's first plan was a toss of a coin"


def test_a_model_that_is_too_large_for_this_machine_is_started(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop refused to write the settings of a model that a server was to run."""
    monkeypatch.chdir(project)
    small = read_machine().model_copy(update={"memory_mib": 8, "gpus": ()})
    monkeypatch.setattr(starting, "read_machine", lambda: small)
    said = init_product("bot", "text", "models/agent", {}, root=Path())
    assert said[0].startswith("warning: candidates.bot (models/agent): serving takes ")
    assert "bot" in load_params().products


def test_a_mixture_of_experts_is_started_as_it_is(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be served and compared, but not quantised: nothing was written at all."""
    monkeypatch.chdir(project)
    write_tiny_model(Path("models/experts"), "mixtral")
    init_product("bot", "text", "models/experts", {}, root=Path())
    product = load_params().products["bot"]
    assert product.release == ["bot-again"] and product.candidates["bot-again"].steps == []
    assert "# not quantised: " in Path("params.yaml").read_text()


def test_a_link_to_the_project_leads_into_it(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(project)
    monkeypatch.chdir(link)
    said = init_product("bot", "text", f"{link}/models/agent", {}, root=Path())
    assert not any("outside" in line for line in said)
    assert load_params().products["bot"].candidates["bot"].checkpoint == "models/agent"


def test_a_path_outside_of_the_project_is_warned_of(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    said = init_product("bot", "text", str(ROOT / "models/agent"), {}, root=Path())
    assert said[0].startswith(f"warning: {ROOT / 'models/agent'}: it lies outside of the project"), said


def test_gpt_2_is_started_with_its_positions_and_says_why_it_is_not_quantised(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got a context that its server refused, and a release of itself without a word."""
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.chdir(project)
    folder, limit = Path("models/gpt2"), 256
    config = GPT2Config(vocab_size=1024, n_embd=32, n_layer=1, n_head=2, n_positions=limit, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    for file in Path("models/agent").glob("tokenizer*"):
        shutil.copy(file, folder)
    said = init_product("bot", "text", "models/gpt2", {}, root=Path())
    assert said[0].startswith("warning: bot-again: not quantised: models/gpt2: expected linear layers"), said
    product = load_params().products["bot"]
    assert isinstance(product, TextProduct) and product.serving.context_length == limit


def test_a_path_in_the_project_is_named_from_its_root(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completed by a shell, it was written as of this machine: in another clone nothing was found."""
    monkeypatch.chdir(project)
    places = {name: str(project / "models" / name) for name in ("product-shots", "product-shots-clip")}
    init_product("bot", "images", places["product-shots"], {"clip": places["product-shots-clip"]}, root=Path())
    assert str(project) not in Path("params.yaml").read_text()
    product = load_params().products["bot"]
    assert product.candidates["bot"].checkpoint == "models/product-shots"


@pytest.mark.parametrize(
    ("name", "kind", "checkpoint", "options", "said"),
    [
        ("agent", "text", "models/agent", {}, "products.agent: expected a new name, it is in params.yaml already"),
        ("awq-long", "text", "models/agent", {}, "candidates.awq-long: expected a new name, 'agent' has it already"),
        (
            "Bot",
            "text",
            "models/agent",
            {},
            "params.yaml: products.Bot: expected a name of lower-case letters",
        ),
        ("bot", "speech", "models/agent", {}, "--kind: expected one of text, images, vision, got 'speech'"),
        ("bot", "text", "models/none", {}, "models/none: expected a checkpoint folder, found none"),
        ("bot", "text", "hf://org/name", {}, "--checkpoint: expected hf://ORG/NAME@REVISION with the 40 hex"),
        ("bot", "text", "models/agent", UPSCALER, "--task: expected none with kind text, got 'upscaling'; remove it"),
        ("bot", "text", "models/my agent", {}, "--checkpoint: expected letters, digits and ._/:@+-, got 'models/my "),
        ("bot", "vision", "models/upscaler", {}, "--task: expected detection or upscaling, found none"),
        ("bot", "vision", "models/agent", UPSCALER, "--adapter: expected a Python file with build, preprocess and"),
        (
            "bot",
            "vision",
            f"hf://org/name@{40 * 'a'}",
            UPSCALER,
            "--checkpoint: expected a folder of the project with ",
        ),
        ("bot", "images", "models/product-shots", {}, "--clip: expected the folder of the CLIP that judges the "),
    ],
)
def test_what_stands_in_the_way_is_one_line_and_nothing_is_written(
    project: Path, name: str, kind: str, checkpoint: str, options: dict[str, str], said: str
) -> None:
    before = snapshot(project)
    with pytest.raises(QuantgateError) as caught:
        init_product(name, kind, checkpoint, options, root=project)
    assert str(caught.value).replace(f"{project}/", "").startswith(said)
    assert snapshot(project) == before


@pytest.mark.parametrize("name", ["123", "null", "1e3", "2024-01-01", "2024-99-99"])
def test_a_name_that_yaml_reads_as_no_text_is_refused(project: Path, name: str) -> None:
    """The user was told to quote a line that was never written; quoted in the shell, the name was another one."""
    before = snapshot(project)
    with pytest.raises(SettingsError) as caught:
        init_product(name, "text", "models/agent", {}, root=project)
    said = "expected a name that is text in YAML, got a number, a date or the like; choose another, such as bot-"
    assert str(caught.value) == f"params.yaml: products.{name}: {said}{name}"
    assert snapshot(project) == before


@pytest.mark.parametrize("path", ["123", "null", "2024-01-01"])
def test_a_path_that_yaml_reads_as_no_text_is_refused(project: Path, path: str) -> None:
    """The user was told of a key of params.yaml, which nobody had written."""
    (project / path).symlink_to(project / "models/agent")
    before = snapshot(project)
    with pytest.raises(SettingsError) as caught:
        init_product("bot", "text", path, {}, root=project)
    said = "expected a path that is text in YAML, got a number, a date or the like; write it as ./"
    assert str(caught.value) == f"--checkpoint: {said}{path}, or rename it"
    assert snapshot(project) == before


@pytest.mark.parametrize("name", ["", "..", "'bot'", "bot:", "bot #x", "{x}", "!!str 12"])
def test_a_name_that_is_no_name_is_refused_as_one(project: Path, name: str) -> None:
    """It was told as a release that is there, as YAML of lines that nobody wrote, or as a traceback."""
    with pytest.raises(SettingsError, match="^params.yaml: products.*: expected a name of lower-case letters"):
        init_product(name, "text", "models/agent", {}, root=project)


def test_a_checkpoint_that_a_check_refuses_leaves_no_examples_behind(project: Path) -> None:
    (project / "models/agent/chat_template.jinja").write_text("{% if tools %}")
    before = snapshot(project)
    with pytest.raises(SettingsError, match="expected a chat template in Jinja"):
        init_product("bot", "text", "models/agent", {}, root=project)
    assert snapshot(project) == before


def test_a_chat_template_in_another_encoding_is_one_line(project: Path) -> None:
    """It was a traceback."""
    (project / "models/agent/chat_template.jinja").write_bytes(b"caf\xe9")
    before = snapshot(project)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: expected a chat template in UTF-8: "):
        init_product("bot", "text", "models/agent", {}, root=project)
    assert snapshot(project) == before


@pytest.mark.parametrize(("size", "side"), [(640, 640), (100, 320), (1_000_000, 320)])
def test_pictures_are_of_the_size_that_config_json_names_where_it_is_one_of_pictures(
    project: Path, size: int, side: int
) -> None:
    """A `size` may be another number, and pictures of that many pixels took all memory of the machine."""
    (project / "models/people").unlink()
    shutil.copytree(ROOT / "models/people", project / "models/people")
    path = project / "models/people/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": size}))
    init_product("bot", "vision", "models/people", {"task": "detection"}, root=project)
    with Image.open(project / "evalsets/bot-pictures/images/picture-1.png") as picture:
        assert picture.size == (side, side)


@pytest.mark.parametrize(("config", "scale"), [({"scale": 4}, 4), ({"upscale": 3}, 3), ({"scale": 0.18}, 2), ({}, 2)])
def test_targets_are_as_much_larger_as_config_json_says(project: Path, config: dict[str, float], scale: int) -> None:
    """An upscaler by 4 got targets of twice its pictures, on which its first run ended."""
    (project / "models/upscaler").unlink()
    shutil.copytree(ROOT / "models/upscaler", project / "models/upscaler")
    path = project / "models/upscaler/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    init_product("bot", "vision", "models/upscaler", UPSCALER, root=project)
    sizes = []
    for name in ("images", "targets"):
        with Image.open(project / f"evalsets/bot-pictures/{name}/picture-1.png") as picture:
            sizes.append(picture.size[0])
    assert sizes == [80, 80 * scale]


def test_a_config_beside_an_onnx_file_of_free_sides_says_how_much_it_enlarges(project: Path) -> None:
    """It was not read there, and the first run ended on targets of twice the pictures."""
    write_model(
        project / "models/larger/model.onnx",
        [make_node("Resize", ["pictures", "", "scales"], ["larger"])],
        inputs={"pictures": (FLOAT, (1, 3, "rows", "columns"))},
        outputs={"larger": (FLOAT, (1, 3, "more_rows", "more_columns"))},
        weights=[make_weight("scales", np.array([1, 1, 4, 4], np.float32))],
    )
    (project / "models/larger/config.json").write_text('{"scale": 4}')
    adapter = shutil.copy(ROOT / "models/upscaler/upscaler.py", project / "models/larger")
    init_product("bot", "vision", "models/larger", UPSCALER | {"adapter": str(adapter)}, root=project)
    for name, expected in (("images", 80), ("targets", 320)):
        with Image.open(project / f"evalsets/bot-pictures/{name}/picture-1.png") as picture:
            assert picture.size == (expected, expected)


@pytest.mark.parametrize(("side", "scale"), [(64, 2), (512, 2), (64, 4)])
def test_an_upscaler_that_takes_one_size_gets_pictures_of_it(project: Path, side: int, scale: int) -> None:
    """One exported for 512 pixels got pictures of 128, on which its first run ended."""
    scales = make_weight("scales", np.array([1, 1, scale, scale], np.float32))
    write_model(
        project / "models/twice/model.onnx",
        [make_node("Resize", ["pictures", "", "scales"], ["larger"])],
        inputs={"pictures": (FLOAT, (1, 3, side, side))},
        outputs={"larger": (FLOAT, (1, 3, scale * side, scale * side))},
        weights=[scales],
    )
    adapter = shutil.copy(ROOT / "models/upscaler/upscaler.py", project / "models/twice")
    init_product("bot", "vision", "models/twice", UPSCALER | {"adapter": str(adapter)}, root=project)
    for name, expected in (("images", side), ("targets", scale * side)):
        with Image.open(project / f"evalsets/bot-pictures/{name}/picture-1.png") as picture:
            assert picture.size == (expected, expected)


def test_a_second_time_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    command = ["init", "bot", "--kind", "text", "--checkpoint", "models/agent"]
    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and "dvc repro gate@bot" in said[1]
    assert main(command) == 1
    assert capsys.readouterr().err == (
        "quantgate: products.bot: expected a new name, it is in params.yaml already; go on with it by "
        "`dvc repro gate@bot`, or choose another\n"
    )


def test_the_shipped_products_go_with_all_that_git_holds_of_their_runs(project: Path) -> None:
    init_product("bot", "text", "models/agent", {}, root=project, remove_shipped=True)
    params = load_params(project / "params.yaml")
    assert list(params.products) == ["bot"] and list(params.products["bot"].candidates) == ["bot", "bot-int4"]
    assert not [path for folder in ("release", "reports", "metrics") for path in (project / folder).iterdir()]
    comments = re.findall("#.*", (project / "params.yaml").read_text(encoding="utf-8"))
    gone = ("each has", *SHIPPED)
    assert not [line for line in comments if any(word in line for word in gone)], "of what is gone"
    lock = (project / "dvc.lock").read_text(encoding="utf-8")
    assert [line for line in lock.splitlines() if line.startswith("  ") and line[2] != " "] == ["  env:"]
    with pytest.raises(SettingsError, match="--remove-shipped: expected one of agent, shots, .* found none"):
        init_product("other", "text", "models/agent", {}, root=project, remove_shipped=True)


def test_the_shipped_products_are_those_of_params_yaml() -> None:
    """One that the list forgets would stay in a user's project."""
    assert set(SHIPPED) == set(load_params(ROOT / "params.yaml").products)


def test_the_shipped_cases_may_be_released_by() -> None:
    for product in load_params(ROOT / "params.yaml").products.values():
        check_own_cases(product, ROOT)


def test_what_git_could_not_bring_back_is_not_removed(project: Path) -> None:
    (project / "reports/shots/mine.txt").write_text("notes")
    before = snapshot(project)
    with pytest.raises(SettingsError, match="expected reports/shots/mine.txt as git holds it, found changes"):
        init_product("bot", "text", "models/agent", {}, root=project, remove_shipped=True)
    assert snapshot(project) == before


@pytest.mark.parametrize(("shape", "size"), [("8b", 128), ("odd", 32), ("odder", 4)])
def test_groups_are_the_largest_that_divide_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, size: int
) -> None:
    """With 172 inputs the candidate was the reference once more."""
    monkeypatch.setitem(SHAPES, "odd", (1, 256, 288, 4, 4))
    monkeypatch.setitem(SHAPES, "odder", (1, 64, 172, 4, 4))
    assert choose_step(write_hollow_llama(tmp_path / "model", shape)).group_size == size


def test_a_folder_of_checkpoints_is_refused_with_those_that_it_holds(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init` asked for a config.json to be copied there."""
    monkeypatch.chdir(project)
    with pytest.raises(CheckpointError, match="^expected a folder with config.json, found none in .models.; name one"):
        init_product("bot", "text", "models", {}, root=Path())


TEXT = """\
# all
products:
  # the first
  one:
    kind: text  # of its own

    # inside
    evals: {}

  # the second
  two: {kind: text}

# checkpoints
candidates:
  one: {product: one}
"""


def test_an_entry_is_put_behind_the_last_one_of_its_block() -> None:
    added = add_entry(TEXT, "products", "# mine\nthree:\n  kind: text\n")
    assert added == TEXT.replace("  two: {kind: text}\n", "  two: {kind: text}\n\n  # mine\n  three:\n    kind: text\n")


def test_an_entry_goes_with_its_own_comment_alone() -> None:
    assert remove_entries(TEXT, "products", ["one"]) == TEXT.replace(
        "  # the first\n  one:\n    kind: text  # of its own\n\n    # inside\n    evals: {}\n\n", ""
    )
    assert "# the first" in remove_entries(TEXT, "products", ["two"])
    assert "# checkpoints" in remove_entries(TEXT, "products", ["two"])


def test_a_layout_that_can_not_be_edited_is_told(project: Path) -> None:
    """JSON is YAML, and what comes of it must say the same as before."""
    data = read_yaml(project / "params.yaml")
    (project / "params.yaml").write_text(json.dumps(data))
    before = snapshot(project)
    with pytest.raises(SettingsError, match="add the product by hand"):
        init_product("bot", "text", "models/agent", {}, root=project)
    assert snapshot(project) == before
