"""One word finds a stage's file, its entry in dvc.yaml and what it depends on."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.products import KINDS
from pipeline.products.inputs import digest_inputs
from pipeline.products.params import parse_params
from pipeline.products.text.settings import ServingSettings
from pipeline.records.serving import ServingConfig
from pipeline.running.stage_code import NOT_A_STAGE, list_code, list_stages
from pipeline.running.staleness import read_commands
from tests.paths import ROOT

INPUTS = "build/env/inputs.json"
OF_A_CANDIDATE, OF_A_PRODUCT = "${candidates}", "${products}"  # what a stage's foreach is over
MAX_STAGE_LINES = 60


def read_yaml(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load((ROOT / name).read_text(encoding="utf-8"))
    return loaded


ENTRIES: dict[str, dict[str, Any]] = read_yaml("dvc.yaml")["stages"]
DVC_STAGES = {name: entry.get("do", entry) for name, entry in ENTRIES.items()}  # under `foreach` its `do` part
PARAMS = read_yaml("params.yaml")
REPEATED = [stage for stage in DVC_STAGES if stage != "env"]


def _names(entries: list[Any]) -> list[str]:
    return [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]


def test_every_file_is_a_stage_and_every_stage_runs_a_file() -> None:
    assert set(DVC_STAGES) == set(list_stages(ROOT))


@pytest.mark.parametrize("stage", DVC_STAGES)
def test_command_runs_the_file_of_the_same_name(stage: str) -> None:
    """With the product or the candidate behind it."""
    assert DVC_STAGES[stage]["cmd"] == f"python -m stages.{stage}" + ("" if stage == "env" else " ${key}")


def test_dvc_runs_every_stage_for_every_product_or_candidate() -> None:
    over = {OF_A_CANDIDATE: PARAMS["candidates"], OF_A_PRODUCT: PARAMS["products"]}
    assert read_commands(ROOT) == {"env": ["python -m stages.env"]} | {
        f"{stage}@{name}": [f"python -m stages.{stage} {name}"]
        for stage in REPEATED
        for name in over[ENTRIES[stage]["foreach"]]
    }


@pytest.mark.parametrize("stage", REPEATED)
def test_a_stage_reads_and_writes_its_own_product_alone(stage: str) -> None:
    """One that names another's folder would judge one product by the other's records."""
    is_of_product = ENTRIES[stage]["foreach"] == OF_A_PRODUCT
    own = (
        r"(build|reports|metrics|release)/\$\{key\}(/.+)?"
        if is_of_product
        else r"build/\$\{item\.product\}/\w+/\$\{key\}"
    )
    for section in ("deps", "outs", "metrics"):
        for name in _names(DVC_STAGES[stage].get(section, [])):
            assert re.fullmatch(f"{own}|build/env/libraries.json", name), f"{section} of {stage}: {name}"


def _find_words(stage: str) -> Iterator[str]:
    """Yield the words of a stage's file that can tell one kind from another: imports, classes and strings."""
    tree = ast.parse((ROOT / "stages" / f"{stage}.py").read_text(encoding="utf-8"))
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.id if node.id[0].isupper() else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from re.findall(r"[\w-]+", node.value)


@pytest.mark.parametrize("stage", DVC_STAGES)
def test_no_stage_names_a_product_or_a_kind(stage: str) -> None:
    """A product is a section of params.yaml, a kind a folder and a line: neither costs a stage a line."""
    own = {kind.settings.__name__ for kind in KINDS.values()} | {type(kind).__name__ for kind in KINDS.values()}
    work = {"networks", "image_params", "network_params", "text_params", "evals", "optimize", "serving"}
    named = {*KINDS, *PARAMS["products"], *PARAMS["candidates"]}
    words = set(_find_words(stage)) - {stage}
    assert not words & (named | own | (work - {stage}))
    assert not set(re.findall(r"[\w-]+", str(ENTRIES[stage]))) & named
    assert ENTRIES[stage].get("foreach") in ((None,) if stage == "env" else (OF_A_CANDIDATE, OF_A_PRODUCT))


Change = tuple[str, str, str, Any]  # product or candidate, section, key and value


def _digest(*changes: Change) -> dict[str, dict[str, dict[str, str]]]:
    """Return what stage env writes, after changes of the settings."""
    data = read_yaml("params.yaml")
    for name, section, key, value in changes:
        settings = data["products"].get(name) or data["candidates"][name]
        (settings[section] if section else settings)[key] = value
    return digest_inputs(parse_params(data), ROOT)


@cache
def _digest_shipped() -> dict[str, dict[str, dict[str, str]]]:
    return _digest()


def _find_changed(change: Change) -> set[str]:
    """Return the stages that would run again, but for those that depend on their results."""
    before, after = _digest_shipped(), _digest(change)
    assert [*before] == [*after] and all([*before[stage]] == [*after[stage]] for stage in before)
    return {f"{stage}@{key}" for stage, keyed in before.items() for key in keyed if after[stage][key] != keyed[key]}


def _of(product: str, *stages: str) -> set[str]:
    """Name stages of a product, or of all of its candidates."""
    candidates = [name for name, settings in PARAMS["candidates"].items() if settings["product"] == product]
    return {
        f"{stage}@{name}"
        for stage in stages
        for name in (candidates if ENTRIES[stage]["foreach"] == OF_A_CANDIDATE else [product])
    }


JUDGED = ("compare", "gate", "release")


@pytest.mark.parametrize("stage", REPEATED)
def test_a_stage_depends_on_its_own_code_and_inputs(stage: str) -> None:
    """On those of another, an edit goes unnoticed."""
    assert DVC_STAGES[stage]["params"] == [{INPUTS: [f"{stage}.${{key}}"]}]
    names = PARAMS["candidates"] if ENTRIES[stage]["foreach"] == OF_A_CANDIDATE else PARAMS["products"]
    assert list(_digest_shipped()[stage]) == list(names)
    assert all(keyed["code"] for keyed in _digest_shipped()[stage].values())


def _change(value: Any) -> Any:
    """Return another value of the same type, that is valid beside the others."""
    if isinstance(value, bool):
        return not value
    return {"float32": "bfloat16"}[value] if isinstance(value, str) else value + 1


def _list_settings(section: str) -> list[tuple[str, str, Any]]:
    return [
        (name, key, value)
        for name, product in PARAMS["products"].items()
        for key, value in product.get(section, {}).items()
        if not isinstance(value, dict)
    ]


@pytest.mark.parametrize(("product", "key", "value"), _list_settings("resources"))
def test_how_much_of_the_machine_is_taken_costs_no_result(product: str, key: str, value: Any) -> None:
    """A longer timeout would cost every evaluation."""
    assert _find_changed((product, "resources", key, _change(value))) == set()


@pytest.mark.parametrize(("product", "key", "value"), _list_settings("serving"))
def test_what_can_change_an_answer_is_evaluated_and_judged_anew(product: str, key: str, value: Any) -> None:
    """Else answers of another setting are judged."""
    built = ("optimize",) if PARAMS["products"][product]["kind"] == "images" else ()
    calibrated = {"optimize@int8"} if (product, key) == ("people", "num_threads") else set()  # sums are split by thread
    changed = _find_changed((product, "serving", key, _change(value)))
    assert changed == _of(product, *built, "evaluate", *JUDGED) | calibrated


def test_what_can_change_an_answer_of_a_server_is_in_what_it_is_started_with() -> None:
    """Too few: answers of another setting are judged. Too many: a setting that changes none costs every evaluation."""
    of_the_embedded_engine = {"use_cuda_graph", "max_batch_tokens"}
    assert ServingSettings.model_fields.keys() - of_the_embedded_engine <= ServingConfig.model_fields.keys()
    values = dict.fromkeys(ServingSettings.model_fields, 16)
    settings = ServingSettings.model_validate(
        values | {"dtype": "float32", "continuous_batching": True, "use_cuda_graph": False}
    )
    assert settings.options == {"use_cuda_graph": False, "max_batch_tokens": 16}


QUANTISED = ("gptq-short", "gptq-long", "awq-long", "awq-long-g32", "fp8-dynamic", "w8a8", "fp8-kv", "nvfp4", "mixed")
UNCALIBRATED = ("fp8-dynamic", "w8a8")
TRACED = [(name, "", "trace", True) for name in ("awq-long", "hot-fp16", "tiled")]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (("agent", "gate", "alpha", 0.04), lambda: _of("agent", *JUDGED)),
        (("people", "gate", "alpha", 0.04), lambda: _of("people", *JUDGED)),
        (("agent", "", "release", ["awq-long"]), lambda: _of("agent", *JUDGED)),
        # both sides are timed, and a candidate of the same weights is another one
        (("agent", "", "reference", "agent-again"), lambda: _of("agent", "benchmark", *JUDGED)),
        # pictures are compared with the reference's
        (("shots", "", "reference", "shots-again"), lambda: _of("shots", "evaluate", "benchmark", *JUDGED)),
        (("people", "", "reference", "people-again"), lambda: _of("people", *JUDGED)),  # judged by the same weights
        (("agent", "benchmark", "rounds", 7), lambda: _of("agent", "benchmark", *JUDGED)),
        (("agent", "benchmark", "max_slowdown", 0.5), lambda: _of("agent", *JUDGED)),
        (("agent", "canary", "num_prompts", 101), lambda: _of("agent", "evaluate", *JUDGED)),
        (("agent", "canary", "session_calls", 6), lambda: _of("agent", *JUDGED)),
        (
            ("agent", "optimize", "num_threads", 3),
            lambda: _of("agent", *JUDGED) | {f"optimize@{name}" for name in QUANTISED},
        ),
        (
            ("agent", "optimize", "calibration_texts", "evalsets/prose"),
            lambda: _of("agent", *JUDGED) | {f"optimize@{name}" for name in QUANTISED if name not in UNCALIBRATED},
        ),
        (("awq-long", "", "checkpoint", "models/agent-draft"), lambda: {"optimize@awq-long"} | _of("agent", *JUDGED)),
        *((traced, lambda n=traced[0]: {f"evaluate@{n}"}) for traced in TRACED),
        (("tiled", "", "steps", []), lambda: {"optimize@tiled"} | _of("upscaler", *JUDGED)),
    ],
)
def test_a_setting_makes_stale_what_it_can_change_and_nothing_else(
    change: Change, changed: Callable[[], set[str]]
) -> None:
    assert _find_changed(change) == changed()


@pytest.mark.parametrize("stage", DVC_STAGES)
def test_nothing_is_listed_twice(stage: str) -> None:
    for section in ("deps", "outs", "metrics"):
        names = _names(DVC_STAGES[stage].get(section, []))
        assert len(names) == len(set(names)), f"{section} of {stage} in dvc.yaml"


@pytest.mark.parametrize(("stage", "kind"), [*(("evaluate", kind) for kind in KINDS), ("benchmark", "text")])
def test_what_is_kept_of_a_run_is_kept_under_the_code_of_its_own_stage(stage: str, kind: str) -> None:
    """Under that of another, a run that was killed and goes on after an edit would mix old cases with new."""
    [asked] = {
        names
        for path in list_code(stage, kind, ROOT)
        if path.startswith("pipeline/") and path.endswith(".py")
        for names in re.findall(r'digest_code\("(\w+)", "(\w+)"\)', (ROOT / path).read_text(encoding="utf-8"))
    }
    assert asked == (stage, kind)


@pytest.mark.parametrize("stage", list_stages(ROOT))
def test_stage_file_stays_thin(stage: str) -> None:
    lines = (ROOT / "stages" / f"{stage}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_STAGE_LINES, "a stage reads, calls pipeline and writes; the work belongs in pipeline/"


def test_nothing_else_lies_among_the_stages() -> None:
    allowed = {*NOT_A_STAGE, *(f"{stage}.py" for stage in list_stages(ROOT))}
    assert {path.name for path in (ROOT / "stages").iterdir() if path.name != "__pycache__"} <= allowed


def test_the_last_release_outlives_a_run() -> None:
    """DVC deletes an output ahead of its stage, unless it persists: a release that fails would take the last one away,
    and with it what loosened settings are compared with."""
    [release] = [out for stage in DVC_STAGES.values() for out in stage.get("outs", []) if "release/" in str(out)]
    assert release == {"release/${key}": {"cache": False, "persist": True}}
