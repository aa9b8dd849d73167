"""A proposed policy goes into params.yaml, and nothing else there changes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.errors import SettingsError
from pipeline.products.vision.conv_policy import Algorithm, Dtype
from pipeline.products.vision.policy_settings import choose_default, list_rules, tabulate, write_policy
from pipeline.products.vision.proposal import LayerProposal

BEFORE = """\
# Every setting.
products:
  people:
    kind: vision
    release: [a]   # keep

candidates:
  plain:
    product: people
    checkpoint: models/people
    steps: []

  # Found on calibration images.
  calibrated:
    product: people
    checkpoint: models/people
    steps:
"""
AFTER = """
  # What follows belongs to the next candidate.
  other:
    product: people
    checkpoint: 'models/people'
    steps: [{kind: channels_last}]

  # Of another product.
  tiled:
    product: upscaler
    checkpoint: models/upscaler
    steps: []
"""
LAYOUTS = {
    "block": """\
      - kind: conv_policy
        algorithm: direct        # direct | winograd_f23 | winograd_f43
        dtype: float32           # of all that no rule names
        rules:
          # by hand
          - {layers: [stem], algorithm: direct, dtype: float32, reason: "it: is #1"}  # the last
""",
    "no rules": """\
      - kind: conv_policy
        algorithm: direct        # direct | winograd_f23 | winograd_f43
        dtype: float32           # of all that no rule names
""",
    "rules first": """\
      - rules: []
        kind: conv_policy
        algorithm: direct
        dtype: float32
""",
    "braces": "      - {kind: conv_policy, algorithm: direct, dtype: float32}   # comment\n",
    "beside another": """\
      - {kind: conv_policy, algorithm: direct, dtype: float32}
      - kind: tiling   # keep this
        tile: 64
""",
}


def propose(layer: str, algorithm: Algorithm, dtype: Dtype = "float16", *, can: bool = True) -> LayerProposal:
    reason = f'F(4,3)\'s input transform reaches 98,000: "too much" # for {layer}'
    return LayerProposal(layer, algorithm, dtype, reason, {}, can, 25 if algorithm != "direct" else 100, 100)


PROPOSALS = [
    propose("stem", "direct", can=False),
    propose("b.0", "winograd_f43"),
    propose("b.1", "winograd_f23"),
    propose("b.2", "winograd_f43"),
    propose("1", "direct", "bfloat16"),
    propose("null", "direct"),
    propose("head.1", "direct", "bfloat16", can=False),
]
WANTED = [
    ("b.1", "winograd_f23", "float16"),
    ("1", "direct", "bfloat16"),
    ("null", "direct", "float16"),
    ("head.1", "direct", "bfloat16"),
]


def read_step(text: str, candidate: str = "calibrated") -> dict[str, Any]:
    steps = YAML(typ="safe").load(text)["candidates"][candidate]["steps"]
    return next(step for step in steps if step["kind"] == "conv_policy")


def check_step(step: dict[str, Any]) -> None:
    assert (step["algorithm"], step["dtype"]) == ("winograd_f43", "float16")
    assert [(rule["layers"], rule["algorithm"], rule["dtype"]) for rule in step["rules"]] == [
        ([layer], algorithm, dtype) for layer, algorithm, dtype in WANTED
    ]
    assert [rule["reason"] for rule in step["rules"]] == [
        p.reason for p in PROPOSALS if p.layer in [layer for layer, *_ in WANTED]
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_is_written_and_all_else_stays(layout: str) -> None:
    """ruamel.yaml hangs the comment before the next candidate on the last rule: dumped anew, it would be lost."""
    found = write_policy(BEFORE + LAYOUTS[layout] + AFTER, "calibrated", "float16", PROPOSALS)
    assert found.startswith(BEFORE) and found.endswith(AFTER)
    check_step(read_step(found))
    kept = [line for line in LAYOUTS[layout].splitlines() if "# direct |" in line or "# of all" in line]
    comments = [comment.group() for line in kept if (comment := re.search("#.*", line))]
    assert [comment in found for comment in comments] == [True] * len(kept)
    assert ("# keep this" in found) == ("# keep this" in LAYOUTS[layout])
    again = write_policy(found, "calibrated", "float16", PROPOSALS)
    assert read_step(again) == read_step(found) and again.endswith(AFTER)
    assert write_policy(again, "calibrated", "float16", PROPOSALS) == again


def test_steps_in_brackets_are_laid_out_on_lines() -> None:
    steps = "    steps: [{kind: conv_policy, algorithm: direct, dtype: float32}, {kind: tiling, tile: 8}]  # all\n"
    before = BEFORE.removesuffix("    steps:\n")
    found = write_policy(before + steps + AFTER, "calibrated", "float16", PROPOSALS)
    assert found.startswith(before) and found.endswith(AFTER) and "- {kind: tiling, tile: 8}" in found
    check_step(read_step(found))


def test_without_a_layer_apart_the_old_rules_go() -> None:
    """Left there, they would hold layers that the new default is for."""
    text = BEFORE + LAYOUTS["block"] + AFTER
    found = write_policy(text, "calibrated", "bfloat16", [propose("a", "winograd_f23", "bfloat16")])
    assert read_step(found)["rules"] == [] and found.endswith(AFTER)
    assert read_step(found)["algorithm"] == "winograd_f23" and read_step(found)["dtype"] == "bfloat16"


def test_the_default_is_what_most_layers_with_a_choice_run() -> None:
    """1x1 convolutions, which are direct anyway, would outvote the 3x3 ones."""
    assert (
        choose_default([propose("a", "winograd_f23"), *(propose(c, "direct", can=False) for c in "bcd")])
        == "winograd_f23"
    )
    assert choose_default([propose("a", "direct"), propose("b", "winograd_f43")]) == "winograd_f43"
    assert choose_default([]) == "direct"
    assert not list_rules([propose("a", "direct", can=False)], algorithm="winograd_f43", dtype="float16")


def test_a_name_that_a_shell_would_read_as_a_pattern_is_a_name() -> None:
    rules = list_rules([propose("a[0]", "direct")], algorithm="winograd_f43", dtype="float16")
    assert rules[0]["layers"] == ["a[[]0]"]


@pytest.mark.parametrize(
    ("candidate", "steps", "message"),
    [
        ("absent", "      - kind: conv_policy\n", "absent: expected a candidate with a list of steps"),
        ("calibrated", "      - kind: tiling\n", "expected a step of kind conv_policy, found none"),
        ("calibrated", "      - kind: conv_policy\n        dtype: float16\n", "expected algorithm in the step"),
        ("plain", "      - kind: conv_policy\n", "expected a step of kind conv_policy"),
    ],
)
def test_what_cannot_be_written_is_refused(candidate: str, steps: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        write_policy(BEFORE + steps + AFTER, candidate, "float16", PROPOSALS)


def test_a_candidate_in_braces_is_refused() -> None:
    text = "candidates:\n  a: {product: people, checkpoint: x, steps: [{kind: conv_policy}]}\n"
    with pytest.raises(SettingsError, match="got it in braces"):
        write_policy(text, "a", "float16", PROPOSALS)


def test_the_table_has_a_row_a_layer_and_what_is_saved() -> None:
    lines = tabulate(PROPOSALS).splitlines()
    assert len(lines) == len(PROPOSALS) + 1 and lines[2].split()[:3] == ["b.1", "F(2,3)", "float16"]
    assert lines[-1] == (
        "3x3 convolutions with stride 1: 2 F(4,3), 2 direct, 1 F(2,3); 32 % of the multiplications of "
        "all 7 convolutions are saved"
    )
