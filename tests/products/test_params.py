"""params.yaml: the shipped file is valid, and every kind of mistake is one line with its path."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from pipeline import products
from pipeline.errors import SettingsError
from pipeline.products.images.settings import ImagesProduct
from pipeline.products.params import (
    Params,
    choose_product,
    find_owner,
    get_product,
    load_params,
    parse_params,
)
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.step_settings import QuantizeStep, SpeculativeStep
from pipeline.products.vision.settings import VisionProduct
from pipeline.settings.base import Product
from tests.fakes.synthetic_images import Look, make_image_product
from tests.fakes.synthetic_records import NO_BENCHMARK, describe_project
from tests.fakes.tiny_networks import make_detector, make_upscaler
from tests.paths import ROOT


class Bare(Product):
    """A product of a kind that says nothing of the machine."""

    kind: Literal["bare"]


CALIBRATION = {"sources": ["prose"], "num_samples": 8, "max_tokens": 64, "length_exponent": 0}
TEXT: dict[str, Any] = {
    "kind": "text",
    "reference": "reference",
    "release": ["int4"],
    "optimize": {"calibration_texts": "evalsets/calibration", "num_threads": 1},
    "serving": {
        "dtype": "float32",
        "continuous_batching": True,
        "concurrency": 8,
        "num_threads": 1,
        "context_length": 512,
        "max_tokens": 64,
    },
    "resources": {"num_servers": 1, "request_timeout_s": 60, "start_timeout_s": 60.0},
    "canary": {"num_prompts": 8, "target_rate": 0.3},
    "evals": {
        "prose": {"kind": "perplexity", "evalset": "evalsets/prose"},
        "choices": {"kind": "harness", "task": "choices"},
        "workflows": {"kind": "trajectories", "evalset": "evalsets/workflows", "max_turns": 8},
    },
    "gate": {
        "alpha": 0.05,
        "on_inconclusive": "block",
        "tolerances": {
            "workflows/task_completion_rate": {"overall": 0.02, "buckets": {"long": 0.05}},
            "prose/perplexity_per_token": {"overall": 0.02},
        },
        "tripwires": {"prose/kl_nats_per_token": 0.02},
    },
    "benchmark": {**NO_BENCHMARK, "candidates": ["int4"]},
}
VALID: dict[str, Any] = {
    "products": {"agent": TEXT},
    "candidates": {
        "reference": {"product": "agent", "checkpoint": "models/agent", "steps": []},
        "int4": {
            "product": "agent",
            "checkpoint": "models/agent",
            "steps": [{"kind": "gptq", "calibration": CALIBRATION}],
        },
        "awq": {
            "product": "agent",
            "checkpoint": "models/agent",
            "steps": [{"kind": "awq", "calibration": CALIBRATION}],
        },
    },
}
VLLM = {"kind": "vllm", "command": ["vllm", "serve"], "version": "0.32.0"}
REMOVE = object()


def edited(path: str, value: Any) -> dict[str, Any]:
    """Return VALID with the value at a path ("candidates//int4//steps") replaced or removed.

    A path that starts with neither a candidate nor a product is one of the product's settings.
    """
    data = copy.deepcopy(VALID)
    *parents, last = path.split("//")
    target: Any = data if path.startswith(("candidates", "products")) else data["products"]["agent"]
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if value is REMOVE:
        del target[last]
    elif isinstance(target, list):
        target[int(last)] = value
    else:
        target[last] = value
    return data


def refusal(data: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_params(data)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("params.yaml: ")
    return message.removeprefix("params.yaml: ")


def parse(data: Any) -> TextProduct:
    return get_product(parse_params(data), "agent", kind=TextProduct)


def test_the_shipped_settings_are_valid() -> None:
    products = load_params(ROOT / "params.yaml").products
    assert {product.kind for product in products.values()} == {"text", "images", "vision"}
    for product in products.values():
        assert product.reference in product.candidates and len(product.candidates) >= 5


def test_valid_settings_become_typed_and_frozen() -> None:
    product = parse(VALID)
    gptq, awq = (product.candidates[name].steps[0] for name in ("int4", "awq"))
    assert isinstance(gptq, QuantizeStep) and isinstance(awq, QuantizeStep)
    assert (gptq.algorithm, gptq.scheme, gptq.group_size, gptq.exclude) == ("gptq", "W4A16", 128, ["lm_head"])
    assert gptq.calibration and gptq.calibration.length_exponent == 0.0
    with pytest.raises(ValidationError):
        product.reference = "int4"


NAME = "expected a name of lower-case letters, digits and dashes that begins with no dash"
UNKNOWN = "unknown key; remove it or correct its spelling"
STEP = "candidates//int4//steps//0"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        # unknown keys, at every level
        ("releases", [], f"releases: {UNKNOWN}: is `release` meant"),
        ("candidates//int4//chekpoint", "x", f"candidates.int4.chekpoint: {UNKNOWN}: is `checkpoint` meant"),
        (f"{STEP}//groupsize", 64, f"candidates.int4.steps.0.groupsize: {UNKNOWN}: is `group_size` meant"),
        (
            f"{STEP}//num_grid_points",
            5,
            "candidates.int4.steps.0.num_grid_points: awq alone has it",
        ),
        (f"{STEP}//calibration//samples", 8, f"candidates.int4.steps.0.calibration.samples: {UNKNOWN}"),
        ("serving//threads", 1, f"serving.threads: {UNKNOWN}: is `num_threads` meant"),
        ("evals//workflows//turns", 8, f"evals.workflows.turns: {UNKNOWN}: is `max_turns` meant"),
        ("gate//beta", 0.1, f"gate.beta: {UNKNOWN}"),
        (
            "gate//tolerances//prose/perplexity_per_token//total",
            0.1,
            f"gate.tolerances.prose/perplexity_per_token.total: {UNKNOWN}",
        ),
        # what would let anything through
        ("gate//alpha", 1e-12, "gate.alpha: expected 0.001 or more, got 1e-12"),
        ("release//0", "reference", "release.0: 'reference' is the reference, and a comparison with itself proves"),
        ("reference", "int4", "candidates.int4.steps: expected none, as it is the reference: what the steps cost"),
        ("candidates//int4//engine", {"kind": "sglang"}, "candidates.int4.engine: expected one of the kinds 'transf"),
        (
            "candidates//int4//engine",
            {"kind": "vllm", "command": [], "version": "1"},
            "candidates.int4.engine.command: expected 1 or more entries, got []",
        ),
        ("candidates//int4//steps", REMOVE, "candidates.int4.steps: expected this key, found none"),
        (
            "candidates//int4//engine",
            VLLM | {"command": ["vllm", "serve", "--seed", "1"]},
            "candidates.int4.engine.command.2: expected no option behind `serve`, got '--seed'",
        ),
        ("candidates//int4//engine", VLLM | {"version": "latest"}, "candidates.int4.engine.version: "),
        (
            "candidates//int4//engine",
            VLLM | {"command": ["docker", "run", "-e", "A", "vllm"], "environment": {"A": "1", "B": "2"}},
            "candidates.int4.engine.environment.B: expected `-e B` in engine.command, as a container gets no variable",
        ),
        (
            "candidates//int4//engine",
            {"kind": "openai", "model": "m", "base_url": "http://me:secret@host:8000"},
            "candidates.int4.engine.base_url: expected no user and password, which would be written into reports",
        ),
        (
            "candidates//int4//engine",
            {"kind": "openai", "model": "m", "base_url": "http://exa mple:1"},
            "candidates.int4.engine.base_url: expected http://host:port, got 'http://exa mple:1'",
        ),
        (
            "candidates//int4//engine",
            {"kind": "openai", "model": "m", "base_url": "http://host/x?y=1"},
            "candidates.int4.engine.base_url: expected http://host:port, got 'http://host/x?y=1'",
        ),
        ("canary//target_rate", 1e-9, "canary.target_rate: expected 0.001 or more, got 1e-09"),
        ("canary//num_prompts", 2, "canary.num_prompts: expected 8 or more, got 2"),
        # missing keys
        ("reference", REMOVE, "reference: expected this key, found none"),
        ("candidates//int4//checkpoint", REMOVE, "candidates.int4.checkpoint: expected this key, found none"),
        (f"{STEP}//calibration", REMOVE, "candidates.int4.steps.0.calibration: expected the texts that gptq is"),
        ("evals//workflows//max_turns", REMOVE, "evals.workflows.max_turns: expected this key, found none"),
        # wrong types: nothing is turned into another type
        (f"{STEP}//bits", "4", "candidates.int4.steps.0.weights.num_bits: expected 4 or 8, got '4'"),
        (f"{STEP}//symmetric", "yes", "candidates.int4.steps.0.weights.symmetric: expected true or false"),
        (f"{STEP}//exclude", "lm_head", "candidates.int4.steps.0.exclude: expected a list"),
        ("serving//concurrency", 8.5, "serving.concurrency: expected a whole number"),
        ("resources//num_servers", True, "resources.num_servers: expected a whole number"),
        ("gate//alpha", "5e-2", "gate.alpha: expected a number"),
        ("release", "int4", "release: expected a list"),
        ("candidates//int4", None, "candidates.int4.product: expected one of agent, found none"),
        ("candidates//int4", ["steps"], "candidates.int4: expected keys with values, got ['steps']"),
        ("serving", None, "serving: expected keys with values, got None"),
        # values out of range
        (f"{STEP}//bits", 3, "candidates.int4.steps.0.weights.num_bits: expected 4 or 8, got 3"),
        (f"{STEP}//group_size", 0, "candidates.int4.steps.0.group_size: "),
        (f"{STEP}//damping_fraction", 1.0, "candidates.int4.steps.0.damping_fraction: expected less than 1, got 1.0"),
        (
            f"{STEP}//calibration//sources",
            [],
            "candidates.int4.steps.0.calibration.sources: expected 1 or more entries, got []",
        ),
        (f"{STEP}//calibration//seed", -1, "candidates.int4.steps.0.calibration.seed: expected 0 or more, got -1"),
        (f"{STEP}//calibration//num_samples", 0, "candidates.int4.steps.0.calibration.num_samples: "),
        ("candidates//awq//steps//0//num_grid_points", 2, "candidates.awq.steps.0.num_grid_points: "),
        ("serving//dtype", "int8", "serving.dtype: "),
        ("resources//request_timeout_s", float("inf"), "resources.request_timeout_s: expected a finite number"),
        ("gate//alpha", 0.5, "gate.alpha: "),
        ("gate//alpha", float("nan"), "gate.alpha: "),
        ("gate//on_inconclusive", "ignore", "gate.on_inconclusive: expected 'block' or 'warn'"),
        ("gate//tolerances", {}, "gate.tolerances: "),
        ("gate//tolerances//prose/perplexity_per_token//overall", 0, "gate.tolerances.prose/perplexity_per_token."),
        (
            "gate//tolerances//workflows/task_completion_rate//buckets//long",
            2.0,
            "gate.tolerances.workflows/task_completion_rate.buckets.long: ",
        ),
        ("gate//tripwires//prose/kl_nats_per_token", -1.0, "gate.tripwires.prose/kl_nats_per_token: "),
        ("release", [], "release: "),
        ("candidates", {}, "candidates: "),
        ("evals", {}, "evals: "),
        # kinds
        (
            f"{STEP}//kind",
            "gguf",
            "candidates.int4.steps.0: expected one of the kinds 'quantize', 'gptq', 'awq', 'speculative', got 'gguf'",
        ),
        (f"{STEP}//kind", REMOVE, "candidates.int4.steps.0: expected a key `kind`, got {"),
        ("evals//prose//kind", "bleu", "evals.prose: expected one of the kinds 'perplexity', 'harness', "),
        (
            "candidates//reference//engine",
            {"kind": "openai", "base_url": "localhost:8000", "model": "m"},
            "candidates.reference.engine.base_url: expected http://host:port, got 'localhost:8000'",
        ),
        (
            "candidates//reference//engine",
            {"kind": "openai", "base_url": "ftp://localhost", "model": "m"},
            "candidates.reference.engine.base_url: expected http://host:port, got 'ftp://localhost'",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named_by_its_path(path: str, value: Any, said: str) -> None:
    assert refusal(edited(path, value)).startswith(said if said.startswith("candidates") else f"products.agent.{said}")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("reference", "refrence", "reference: expected one of the candidates (reference, int4, awq), got 'refrence'"),
        ("release", ["int4", "int8"], "release.1: expected one of the candidates (reference, int4, awq), got 'int8'"),
        ("release", ["int4", "int4"], "release.1: 'int4' is listed twice; remove one"),
        (
            "benchmark//candidates",
            ["reference"],
            "benchmark.candidates.0: expected one of the candidates beside the reference (int4, awq), got 'reference'",
        ),
        ("benchmark//candidates", ["int4", "int4"], "benchmark.candidates.1: 'int4' is listed twice; remove one"),
        (
            "benchmark//concurrency",
            [1, 9],
            "benchmark.concurrency.1: expected distinct numbers up to serving.concurrency (8), got 9",
        ),
        ("benchmark//concurrency", [2, 2], "benchmark.concurrency.1: expected distinct numbers up to "),
        (
            "benchmark//prompt_tokens",
            [[10, 20], [20, 30]],
            "benchmark.prompt_tokens: expected bands [least, most] that rise and don't overlap, got [[10, 20], [20, "
            "30]]",
        ),
        ("benchmark//prompt_tokens", [[20, 10]], "benchmark.prompt_tokens: expected bands [least, most] that rise"),
        (
            "benchmark//num_tokens",
            453,
            "benchmark.num_tokens: expected at most 452, as the longest prompts (60 tokens) "
            "share serving.context_length (512) with the answer, got 453",
        ),
        ("benchmark//rounds", 5, "benchmark.rounds: expected 6 or more, got 5"),
        ("benchmark//max_slowdown", 0.0, "benchmark.max_slowdown: expected more than 0, got 0.0"),
        (
            "candidates//Int 4",
            {"product": "agent", "checkpoint": "x", "steps": []},
            f"candidates.Int 4: {NAME}, got 'Int 4'",
        ),
        ("candidates//../up", {"product": "agent", "checkpoint": "x", "steps": []}, f"candidates.../up: {NAME}"),
        (
            "evals//a/b",
            {"kind": "harness", "task": "t"},
            "evals.a/b: expected a name of at most 64 lower-case letters, digits, dashes and underscores that begins",
        ),
        (
            "evals//" + "a" * 65,
            {"kind": "harness", "task": "t"},
            f"evals.{'a' * 65}: expected a name of at most 64 lower-case letters",
        ),
        (
            "candidates//int4//steps",
            [{"kind": "gptq", "calibration": CALIBRATION}, {"kind": "awq", "calibration": CALIBRATION}],
            "candidates.int4.steps.1: expected one quantising step at most, found another after steps.0: what is "
            "quantised can't be quantised again; remove one",
        ),
        (
            f"{STEP}//calibration//sources",
            ["prose", "long", "prose"],
            "candidates.int4.steps.0.calibration.sources.2: 'prose' is listed twice, and counts once; remove one",
        ),
        (
            "serving//max_tokens",
            512,
            "serving.max_tokens: expected less than serving.context_length (512), which prompt and answer share, "
            "got 512",
        ),
        (
            "gate//loosened",
            {"alpha": {"was": 0.05, "now": 0.1, "why": " " * 12}},
            "gate.loosened.alpha.why: expected 10 or more characters, got",
        ),
        (
            "gate//tolerances//workflows/completion",
            {"overall": 0.1},
            "gate.tolerances.workflows/completion: no such metric; the evals give choices/accuracy, ",
        ),
        (
            "gate//tolerances//essays/perplexity_per_token",
            {"overall": 0.1},
            "gate.tolerances.essays/perplexity_per_token: no such metric; ",
        ),
        (
            "gate//tolerances//prose/kl_nats_per_token",
            {"overall": 0.1},
            "gate.tolerances.prose/kl_nats_per_token: no such metric; ",
        ),
        (
            "gate//tripwires//prose/perplexity_per_token",
            0.1,
            "gate.tripwires.prose/perplexity_per_token: no such metric; ",
        ),
        (
            "gate//tolerances//choices/accuracy",
            {},
            "gate.tolerances.choices/accuracy: expected `overall`, `buckets` or both, got neither",
        ),
    ],
)
def test_a_contradiction_is_named_by_its_path(path: str, value: Any, said: str) -> None:
    assert refusal(edited(path, value)).startswith(said if said.startswith("candidates") else f"products.agent.{said}")


DRAFT = {"kind": "speculative", "method": "draft_model", "draft": "models/draft", "num_speculative_tokens": 5}
LOOKUP = {"kind": "speculative", "method": "prompt_lookup", "num_speculative_tokens": 5, "min_acceptance": 0.4}
GPTQ = {"kind": "gptq", "calibration": CALIBRATION}


@pytest.mark.parametrize("steps", [[DRAFT], [LOOKUP], [GPTQ, DRAFT]], ids=["draft", "lookup", "after-gptq"])
def test_a_candidate_may_end_with_a_speculative_step(steps: list[Any]) -> None:
    candidate = parse(edited("candidates//int4//steps", steps)).candidates["int4"]
    assert isinstance(candidate.speculative, SpeculativeStep) and candidate.speculative is candidate.steps[-1]


def test_a_speculative_step_reads_the_key_of_released_settings() -> None:
    old = {"num_tokens" if key == "num_speculative_tokens" else key: value for key, value in DRAFT.items()}
    assert SpeculativeStep.model_validate(old) == SpeculativeStep.model_validate(DRAFT)
    both = DRAFT | {"num_tokens": 5}
    assert refusal(edited("candidates//int4//steps", [both])).startswith(
        "candidates.int4.steps.0.num_tokens: unknown key here"
    )


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            [DRAFT | {"draft": None}],
            "0.draft: expected the draft model's checkpoint folder for method draft_model, found none",
        ),
        (
            [LOOKUP | {"draft": "models/draft"}],
            "0.draft: expected none for method prompt_lookup, got 'models/draft'; remove it",
        ),
        ([DRAFT, LOOKUP], "0: expected one speculative step at most, found another after it; remove one"),
        ([DRAFT, GPTQ], "0: expected speculative to be the last step, found quantize after it: "),
        ([DRAFT | {"num_speculative_tokens": 0}], "0.num_speculative_tokens: expected 1 or more, got 0"),
        ([DRAFT | {"num_speculative_tokens": 17}], "0.num_speculative_tokens: expected 16 or less, got 17"),
        ([DRAFT | {"min_acceptance": 1.5}], "0.min_acceptance: expected 1 or less, got 1.5"),
        ([DRAFT | {"method": "eagle"}], "0.method: expected one of draft_model, prompt_lookup for engine transf"),
        ([DRAFT | {"drafts": "x"}], f"0.drafts: {UNKNOWN}"),
    ],
)
def test_a_speculative_step_that_contradicts_itself_is_refused(steps: list[Any], said: str) -> None:
    assert refusal(edited("candidates//int4//steps", steps)).startswith(f"candidates.int4.steps.{said}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"method": "eagle3"},
            ".method: expected one of draft_model, prompt_lookup for engine transformers, got 'eagle3'",
        ),
        ({"options": {"disable_padded_drafter_batch": True}}, ".options: expected none for engine transformers"),
    ],
)
def test_the_embedded_engine_knows_two_methods(change: dict[str, Any], said: str) -> None:
    assert refusal(edited("candidates//int4//steps", [DRAFT | change])).startswith(f"candidates.int4.steps.0{said}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rejection_sample_method": "fly"}, ".lossy: expected true, as rejection_sample_method 'fly' is not known"),
        ({"model": "models/other"}, ".options.model: expected an option that the step does not set itself"),
        ({"posterior_threshold": 0.1}, ".lossy: expected true, as posterior_threshold lets tokens through"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3},
            ".options: expected drafts that are",
        ),
    ],
)
def test_drafts_that_change_answers_are_refused_unless_it_is_said(options: dict[str, Any], said: str) -> None:
    data = edited("candidates//int4//steps", [DRAFT | {"options": options, "lossy": "synthetic" in str(options)}])
    data["candidates"]["int4"]["engine"] = VLLM
    assert refusal(data).startswith(f"candidates.int4.steps.0{said}")
    data["candidates"]["int4"]["steps"][0]["lossy"] = True
    if "synthetic" not in str(options) and "model" not in options:
        parse_params(data)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_no_mapping_is_refused(data: Any) -> None:
    assert refusal(data) == "products: expected a mapping from each product's name to its settings, found none"


PLAIN = {"checkpoint": "x", "steps": []}
KINDS = "expected one of text, images, vision"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        # products
        ("products", REMOVE, "products: expected a mapping from each product's name to its settings, found none"),
        ("products", {}, "products: expected a mapping from each product's name to its settings, found none"),
        ("products", ["agent"], "products: expected a mapping from each product's name to its settings, got ['agent']"),
        ("products//agent//kind", REMOVE, f"products.agent.kind: {KINDS}, found none"),
        ("products//agent//kind", "audio", f"products.agent.kind: {KINDS}, got 'audio'"),
        ("products//agent//kind", ["text"], f"products.agent.kind: {KINDS}, got ['text']"),
        ("products//agent", None, f"products.agent.kind: {KINDS}, found none"),
        ("products//agent", "text", "products.agent: expected keys with values, got 'text'"),
        ("products//other", TEXT, "products.other: expected a candidate that names it as its product, found none"),
        (
            "products//agent//name",
            "agent",
            "products.agent.name: unknown key; candidates stand in `candidates`, and name their product",
        ),
        (
            "products//agent//candidates",
            {"x": PLAIN},
            "products.agent.candidates: unknown key; candidates stand in `candidates`, and name their product",
        ),
        # names that are folders
        *(
            (f"products//{name}", TEXT, f"products.{name or repr('')}: {NAME}, and not 'env', got {name!r}")
            for name in ("..", "../up", "/up", "", "my agent", "Agent", "-agent", ".agent", "agent_2", "env")
        ),
        # candidates
        ("candidates", REMOVE, "candidates: expected a mapping from each candidate's name to its settings, found none"),
        ("candidates", {}, "candidates: expected a mapping from each candidate's name to its settings, found none"),
        ("candidates", [PLAIN], "candidates: expected a mapping from each candidate's name to its settings, got [{"),
        ("candidates//int4//product", REMOVE, "candidates.int4.product: expected one of agent, found none"),
        ("candidates//int4//product", "agnet", "candidates.int4.product: expected one of agent, got 'agnet'"),
        ("candidates//int4//product", ["agent"], "candidates.int4.product: expected one of agent, got ['agent']"),
        ("candidates//int4//product", "text", "candidates.int4.product: expected one of agent, got 'text'"),
        # what is neither
        ("products//agent//serving//num_servers", 1, "products.agent.serving.num_servers: unknown key here"),
        ("products//agent//sampling", {}, f"products.agent.sampling: {UNKNOWN}"),
    ],
)
def test_a_project_is_products_and_candidates(path: str, value: Any, said: str) -> None:
    assert refusal(edited(path, value)).startswith(said)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("gate", "remove it, or move it into a product"),
        ("images", "remove it, or move it into a product"),
        ("agent", "remove it, or move it into a product"),
        ("Products", "is `products` meant"),
        ("candidate", "is `candidates` meant"),
    ],
)
def test_what_stands_beside_products_and_candidates_is_refused(key: str, remedy: str) -> None:
    """A gate there would seem to hold for all products, and would hold for none."""
    said = f"{key}: expected one of products, candidates, execution, got another key; {remedy}"
    assert refusal(VALID | {key: TEXT["gate"]}) == said


@pytest.mark.parametrize(("name", "key"), [("products", "Products"), ("candidates", "candidate")])
def test_a_misspelt_section_is_reported_and_not_the_one_that_is_missing(name: str, key: str) -> None:
    data = {key if own == name else own: section for own, section in VALID.items()}
    assert refusal(data).endswith(f"is `{name}` meant")


def test_a_misspelled_key_is_reported_and_not_the_one_it_stands_for() -> None:
    data = copy.deepcopy(VALID)
    data["products"]["agent"]["refrence"] = data["products"]["agent"].pop("reference")
    assert refusal(data) == f"products.agent.refrence: {UNKNOWN}: is `reference` meant"


def test_what_may_not_stand_in_a_product_is_not_what_is_meant() -> None:
    for key, meant in {"nam": "", "candidate": "", "reslease": ": is `release` meant"}.items():
        assert refusal(edited(f"products//agent//{key}", {})) == f"products.agent.{key}: {UNKNOWN}{meant}"


def test_a_misspelled_key_of_execution_is_reported_with_the_one_that_is_meant() -> None:
    data = VALID | {"execution": {"kind": "ray", "num_worker": 2}}
    assert refusal(data) == f"execution.num_worker: {UNKNOWN}: is `num_workers` meant"


def test_an_unknown_key_of_execution_is_reported_before_a_wrong_value() -> None:
    data = VALID | {"execution": {"kind": "local", "num_workers": "two", "addres": "auto"}}
    assert refusal(data) == f"execution.addres: {UNKNOWN}"


def test_a_wrong_value_is_named_by_the_path_that_the_file_has() -> None:
    """Pydantic's path goes on with the types that a value may have."""
    data = VALID | {"execution": {"kind": "local", "num_workers": "two"}}
    assert refusal(data) == "execution.num_workers: expected 'auto', or a whole number, got 'two'"


@pytest.mark.parametrize("value", [None, [2], {"auto": 1}, 1.5], ids=str)
def test_a_value_of_no_type_that_its_key_may_have_is_one_line(value: Any) -> None:
    data = VALID | {"execution": {"kind": "local", "num_workers": value}}
    assert refusal(data) == f"execution.num_workers: expected 'auto', or a whole number, got {value!r}"


def test_a_number_out_of_range_is_told_with_the_range() -> None:
    data = VALID | {"execution": {"kind": "local", "num_workers": 0}}
    assert refusal(data) == "execution.num_workers: expected 'auto', or 1 or more, got 0"


def test_more_workers_than_a_product_can_have_are_told_where_they_are_asked_for() -> None:
    """The line named `resources.num_servers` of a product, which the file did not have."""
    data = VALID | {"execution": {"kind": "local", "num_workers": 128}}
    assert refusal(data) == "execution.num_workers: expected 'auto', or 64 or less, got 128"


def test_a_key_that_is_none_or_does_not_fit_on_a_line_is_shown_as_python_writes_it() -> None:
    assert refusal(edited("canary//two\nlines", 1)) == f"products.agent.canary.'two\\nlines': {UNKNOWN}"
    assert refusal(VALID | {"products": {"a b\n": {}}}).startswith("products.'a b\\n': expected a name of ")
    said = refusal(VALID | {"execution": {"kind": "local", None: 1}})
    assert said == "execution.None: expected text as a key, got None; write it in quotes"
    assert len(refusal(VALID | {"x" * 3_000: {}})) < 200
    assert refusal(edited("evals//a\nb", VALID["products"]["agent"]["evals"]["workflows"])).count("\n") == 0
    assert refusal(edited("gate//tolerances//a\nb", {"overall": 0.1})).count("\n") == 0
    for key in (1, 2.5, True, None):
        of_key = f"{key}: expected text as a key, got {key}; write it in quotes"
        assert (
            refusal(VALID | {"execution": {"kind": "ray", "resources": {key: 2.0}}}) == f"execution.resources.{of_key}"
        )
        assert refusal(VALID | {"execution": {"kind": "ray", key: 2.0}}) == f"execution.{of_key}"
        assert refusal(edited("gate", VALID["products"]["agent"]["gate"] | {key: 1})) == f"products.agent.gate.{of_key}"
    assert refusal(edited("gate//tolerances", {None: {"overall": 0.1}})).startswith(
        "products.agent.gate.tolerances.None: "
    )
    assert refusal(VALID | {"candidates": {8: {}}}).endswith(", got 8; write it in quotes")


@pytest.mark.parametrize("value", [3, "resources", {}, [], None], ids=str)
def test_a_key_that_is_what_pydantic_marks_keys_with_is_a_key(value: Any) -> None:
    """A section below it was taken for the key, and looked up."""
    resources = VALID | {"execution": {"kind": "ray", "resources": {"[key]": value if value != 3 else "x"}}}
    assert refusal(resources).startswith("execution.resources.'[key]': expected a number, got ")
    assert refusal(VALID | {"execution": {"kind": "ray", "[key]": value}}) == f"execution.'[key]': {UNKNOWN}"


def test_a_product_or_candidate_that_is_no_section_is_said_to_be_none() -> None:
    for section, name in (("products", "agent"), ("candidates", "int4")):
        for value in ("text", ["a"]):
            data = copy.deepcopy(VALID)
            data[section][name] = value
            assert refusal(data) == f"{section}.{name}: expected keys with values, got {value!r}"


def test_an_entry_with_its_kind_as_a_key_has_that_level_once() -> None:
    data = copy.deepcopy(VALID)
    data["candidates"]["int4"]["steps"][0]["quantize"] = {"bits": 4}
    assert refusal(data) == f"candidates.int4.steps.0.quantize: {UNKNOWN}"


@pytest.mark.parametrize(
    ("key", "value", "owner"),
    [
        ("serving//num_servers", 2, "`resources`"),
        ("evals//workflows//max_tokens", 8, "`serving`"),
        ("candidates//int4//dtype", "float16", "`serving`"),
        ("canary//num_threads", 1, "`optimize` and in `serving`"),
        # a level too high: what stands within the entry comes before other sections
        ("candidates//int4//steps//0//max_tokens", 8, "`calibration`"),
        ("candidates//int4//steps//0//dtype", "int8", "`kv_cache`"),
        ("candidates//int4//scheme", "W4A16", "`steps`"),
    ],
)
def test_a_key_of_another_section_is_sent_there(key: str, value: Any, owner: str) -> None:
    """The nearest key of its own section would be another setting: `num_threads` for `num_servers`."""
    said = refusal(edited(key, value))
    assert said.endswith(f"{key.replace('//', '.')}: unknown key here; one of this name stands in {owner}")


@pytest.mark.parametrize(
    "key", ["evals//choices//evalset", "evals//prose//include_path", "serving//kind", "gate//kind"]
)
def test_a_key_is_not_sent_to_where_it_stands_nor_to_the_kind_of_another_entry(key: str) -> None:
    assert "stands in" not in refusal(edited(key, "x")), "evals of another kind have it, and many entries have a kind"


@pytest.mark.parametrize(
    ("section", "name", "entry", "said"),
    [
        ("candidates", "engine", {"steps": []}, "engine.checkpoint: expected this key, found none"),
        ("candidates", "engine", {"steps": [], "checkpont": "x"}, "checkpont: {}: is `checkpoint` meant"),
        ("candidates", "steps", {"checkpoint": "x", "stepz": []}, "stepz: {}: is `steps` meant"),
        ("evals", "perplexity", {"kind": "harness"}, "evals.perplexity.task: expected this key, found none"),
        ("evals", "tool_calls", {"kind": "trajectories", "max_turnz": 3}, "max_turnz: {}: is `max_turns` meant"),
    ],
)
def test_names_may_be_those_of_keys_and_kinds(section: str, name: str, entry: dict[str, Any], said: str) -> None:
    data = copy.deepcopy(VALID)
    if section == "candidates":
        data["candidates"][name] = {"product": "agent", **entry}
    else:
        data["products"]["agent"]["evals"][name] = entry
    assert refusal(data).endswith(said.format(UNKNOWN))


@pytest.mark.parametrize(("section", "key", "came"), [("products", "kind", "knd"), ("candidates", "product", "prodct")])
def test_a_misspelt_key_that_must_be_there_is_named(section: str, key: str, came: str) -> None:
    data = copy.deepcopy(VALID)
    entry = next(iter(data[section].values()))
    entry[came] = entry.pop(key)
    assert refusal(data).endswith(f", found none, but `{came}`")


def test_a_list_where_keys_belong_is_said_in_our_words() -> None:
    assert refusal(edited("evals//workflows", ["x"])).endswith("evals.workflows: expected keys with values, got ['x']")


def test_a_candidate_may_be_called_like_a_kind() -> None:
    data = copy.deepcopy(VALID)
    data["candidates"]["awq"] = {"product": "agent", "checkpoint": "x", "step": []}
    assert refusal(data) == f"candidates.awq.step: {UNKNOWN}: is `steps` meant"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"a: [", "not valid YAML: "), (b"a: 1\na: 2\n", "not valid YAML: "), (b"a: \xff", "not valid YAML: ")],
)
def test_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load_params(path)
    assert str(caught.value).startswith(f"{path}: {said}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["agent", "shots"], ids=["two-products", "candidates-of-two-products"])
def test_a_name_that_is_there_twice_is_one_line(tmp_path: Path, name: str) -> None:
    """The later of two would hold without a word, and with it another product's weights."""
    path = tmp_path / "params.yaml"
    own = f"  {name}: {{kind: text}}\n"
    twice = {
        "agent": f"products:\n{own}{own}candidates: {{}}\n",
        "shots": "products: {agent: {kind: text}, images: {kind: images}}\ncandidates:\n"
        "  shots: {product: agent, checkpoint: x, steps: []}\n"
        "  shots: {product: images, checkpoint: y, steps: []}\n",
    }
    path.write_text(twice[name])
    with pytest.raises(SettingsError) as caught:
        load_params(path)
    assert re.fullmatch(rf"{path}: not valid YAML: line \d+: found duplicate key \"{name}\".*", str(caught.value))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected the settings file, found none; run from the project root"):
        load_params(tmp_path / "params.yaml")


def test_a_number_in_scientific_notation_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    YAML(typ="safe").dump(VALID, path)
    path.write_text(path.read_text().replace("alpha: 0.05", "alpha: 5e-2"))
    assert load_params(path).products["agent"].gate.alpha == 0.05


def project() -> dict[str, Any]:
    """Return the settings of four products of three kinds; two are of kind vision."""
    data = describe_project(make_detector(), make_upscaler(), make_image_product({"fp16": Look()}, "fp16"))
    return {key: copy.deepcopy(VALID[key]) | data[key] for key in ("products", "candidates")}


def test_each_product_has_the_candidates_that_name_it() -> None:
    products = parse_params(project()).products
    assert {name: (type(product), list(product.candidates)) for name, product in products.items()} == {
        "agent": (TextProduct, ["reference", "int4", "awq"]),
        "detector": (VisionProduct, ["squares", "half"]),
        "upscaler": (VisionProduct, ["doubled", "tiled"]),
        "shots": (ImagesProduct, ["shots", "fp16"]),
    }
    assert {name: product.name for name, product in products.items()} == {name: name for name in products}
    detector, upscaler = products["detector"], products["upscaler"]
    assert isinstance(detector, VisionProduct) and isinstance(upscaler, VisionProduct)
    assert [detector.task, upscaler.task] == ["detection", "upscaling"]
    assert len({folder for product in products.values() for folder in (product.build, product.reports)}) == 8


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "reference",
            "int4",
            "products.detector.reference: expected one of the candidates (squares, half), got 'int4'",
        ),
        (
            "release",
            ["tiled"],
            "products.detector.release.0: expected one of the candidates (squares, half), got 'tiled'",
        ),
    ],
)
def test_a_candidate_of_another_product_is_none(key: str, value: Any, said: str) -> None:
    """Names are unique in the project, so one that is known at all is easily taken for one of this product."""
    data = project()
    data["products"]["detector"][key] = value
    assert refusal(data) == said


def test_a_candidate_that_changes_its_product_is_told_by_the_settings_of_that_one() -> None:
    data = project()
    data["candidates"]["int4"]["product"] = "shots"
    data["products"]["agent"] |= {"release": ["awq"], "benchmark": TEXT["benchmark"] | {"candidates": []}}
    assert refusal(data).startswith("candidates.int4.steps.0: expected one of the kinds 'vae_precision', ")


@pytest.mark.parametrize("name", ["agent", "detector", "upscaler", "shots"])
def test_a_contradiction_is_found_in_every_product(name: str) -> None:
    """And told with its name: the same key stands in all of them."""
    data = project()
    data["products"][name]["gate"]["tolerances"]["none/such"] = {"overall": 0.1}
    assert refusal(data).startswith(f"products.{name}.gate.tolerances.none/such: no such metric; the evals give ")


def test_a_product_is_found_by_its_name_and_by_its_candidates() -> None:
    params = parse_params(project())
    assert get_product(params, "detector", kind=VisionProduct) is params.products["detector"]
    assert choose_product(params, None, kind=TextProduct).name == "agent"
    assert choose_product(params, "upscaler", kind=VisionProduct).name == "upscaler"
    assert find_owner(params, "doubled", kind=Product).name == "upscaler"


@pytest.mark.parametrize(
    ("find", "said"),
    [
        (lambda p: get_product(p, "shots", kind=VisionProduct), "products: expected detector or upscaler, got 'shots'"),
        (lambda p: get_product(p, "vision", kind=ImagesProduct), "products: expected shots, got 'vision'"),
        (lambda p: choose_product(p, None, kind=VisionProduct), "expected the name of a product (detector, upscaler)"),
        (lambda p: choose_product(p, "agent", kind=ImagesProduct), "products: expected shots, got 'agent'"),
        (
            lambda p: find_owner(p, "fp16", kind=VisionProduct),
            "candidates: expected one of squares, half, doubled, tiled, got 'fp16'",
        ),
    ],
)
def test_a_name_that_is_none_of_its_kind_is_told_with_those_that_are(find: Callable[[Params], Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        find(parse_params(project()))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (TextProduct, "agent", "products: expected one of this kind, got 'agent'"),
        (TextProduct, None, "expected the name of a product (there is none of this kind)"),
    ],
)
def test_a_project_need_not_have_a_product_of_every_kind(kind: type[Product], name: str | None, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        choose_product(parse_params(describe_project(make_detector())), name, kind=kind)
    assert str(caught.value) == said


def test_a_benchmark_needs_an_eval_that_may_generate_texts() -> None:
    data = copy.deepcopy(VALID)
    product = data["products"]["agent"]
    product["gate"]["tolerances"] = {"prose/perplexity_per_token": {"overall": 0.02}}
    product["evals"] = {"prose": product["evals"]["prose"]}
    product["gate"]["tripwires"] = {}
    assert refusal(data).startswith(
        "products.agent.benchmark.candidates: expected an eval of kind tool_calls or trajectories, or an lm-eval task "
    )
    product["benchmark"]["candidates"] = []
    assert not parse(data).chat_evals


def test_sections_that_a_product_has_no_use_for_may_be_left_out() -> None:
    """Each was demanded with made-up numbers of a model that neither chats nor calibrates."""
    data = copy.deepcopy(VALID)
    product = data["products"]["agent"]
    product["gate"] |= {"tolerances": {"choices/accuracy": {"overall": 0.02}}, "tripwires": {}}
    product["evals"] = {"choices": product["evals"]["choices"]}
    for key in ("optimize", "resources", "canary", "benchmark"):
        del product[key]
    data["candidates"]["awq"]["steps"] = data["candidates"]["int4"]["steps"] = []
    agent = get_product(parse_params(data), "agent", kind=TextProduct)
    assert agent.benchmark.candidates == [] and agent.list_rules()["timed"] == ()
    data["candidates"]["int4"] = VALID["candidates"]["int4"]
    assert refusal(data).startswith("candidates.int4.steps.0.calibration: expected texts to calibrate on, found no ")


def test_a_limit_of_a_threshold_that_is_not_asked_for_is_refused() -> None:
    """It was accepted, and did nothing."""
    data = describe_project(make_image_product({"half": Look()}, "half"))
    step = {"kind": "guidance", "scale": 7.5, "sample_max_value": 3}
    data["candidates"]["half"]["steps"] = [step]
    assert refusal(data).startswith(
        "candidates.half.steps.0.sample_max_value: expected dynamic_threshold_percentile beside it"
    )
    data["candidates"]["half"]["steps"] = [step | {"dynamic_threshold_percentile": 99.5}]
    parse_params(data)


def test_black_images_must_have_a_tolerance() -> None:
    data = describe_project(make_image_product({"half": Look()}, "half"))
    parse_params(data)
    del data["products"]["shots"]["gate"]["tolerances"]["shots/sound_image_rate"]
    assert refusal(data).startswith("products.shots.gate.tolerances: expected shots/sound_image_rate with an overall ")


@pytest.mark.parametrize(("window", "is_refused"), [("hann", True), ("linear", True), ("none", False)])
def test_decoding_tiles_that_can_not_blend_is_refused(window: str, is_refused: bool) -> None:
    """A window over no overlap cuts as none does, and the report would call it blended."""
    data = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    step = {"kind": "vae_tiling", "tile": 32, "overlap": 0.0, "window": window}
    data["candidates"]["cut"] = data["candidates"]["vae-tiled"] | {"steps": [step]}
    if is_refused:
        assert refusal(data).startswith(
            "candidates.cut.steps.0.overlap: expected a pixel or more for window "
            f"{window} to blend, got 0 of a tile of 32"
        )
    else:
        parse_params(data)


def test_a_limit_on_speed_asks_for_the_time_of_everything_that_is_released() -> None:
    """What no benchmark timed had no speed to be judged, and compare called it a pass."""
    limited = edited("benchmark//max_slowdown", 0.1)
    parse_params(limited)
    limited["products"]["agent"]["benchmark"]["candidates"] = []
    assert refusal(limited).startswith("products.agent.benchmark.max_slowdown: expected every released candidate among")


def test_a_kind_without_resources_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told of a key that its user never wrote."""
    data = edited("benchmark//max_slowdown", None)
    kind: Any = SimpleNamespace(settings=Bare, find_problems=lambda product: [])
    monkeypatch.setitem(products.KINDS, "bare", kind)
    section = {key: data["products"]["agent"][key] for key in ("reference", "release", "gate")}
    data["products"] = {"agent": section | {"kind": "bare", "evals": {"x": 1}}}
    product = parse_params(data).products["agent"]
    assert product.num_workers == 1 and product.use_workers(4) == product
