"""Write a proposed convolution policy into params.yaml, and show it as a table.

Only the settings of one step change: what stands there is replaced by position, so every comment, blank line and
quote elsewhere stays as it is, byte for byte. Not covered: a candidate that is written on one line in braces.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from glob import escape
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from pipeline.errors import SettingsError
from pipeline.products.vision.conv_policy import Algorithm, Dtype
from pipeline.products.vision.proposal import NAMES, LayerProposal, find_saved_fraction

_KIND = "conv_policy"
_PLAIN = re.compile(r"[A-Za-z_]\w*(\.\w+)+")  # layer names that YAML reads as text without quotes
_INDENT = "  "

Edit = tuple[int, int, str]  # from character, to character, what stands there instead


def choose_default(proposals: Sequence[LayerProposal]) -> Algorithm:
    """Return the algorithm that most layers with a choice run; of equally many the one with fewest multiplications."""
    counts = Counter(p.algorithm for p in proposals if p.can_run_winograd)
    algorithms: tuple[Algorithm, ...] = ("winograd_f43", "winograd_f23", "direct")
    return max(algorithms, key=lambda algorithm: counts[algorithm]) if counts else "direct"


def list_rules(proposals: Sequence[LayerProposal], *, algorithm: Algorithm, dtype: Dtype) -> list[dict[str, Any]]:
    """Return a rule for each layer that the default would run otherwise than is proposed."""
    return [
        {"layers": [escape(p.layer)], "algorithm": p.algorithm, "dtype": p.dtype, "reason": p.reason}
        for p in proposals
        if (p.algorithm, p.dtype) != (algorithm if p.can_run_winograd else "direct", dtype)
    ]


def write_policy(text: str, candidate: str, dtype: Dtype, proposals: Sequence[LayerProposal]) -> str:
    """Return params.yaml with a candidate's `conv_policy` step set to what is proposed.

    Args:
        text: of params.yaml.
        candidate: has the step.
        dtype: the default; the default algorithm is the most common one.
        proposals: of all convolutions of the network.

    Raises:
        SettingsError: there is no such step, or it is laid out so that it can't be replaced alone.
    """
    algorithm = choose_default(proposals)
    settings = {
        "kind": _KIND,
        "algorithm": algorithm,
        "dtype": dtype,
        "rules": list_rules(proposals, algorithm=algorithm, dtype=dtype),
    }
    where = f"candidates.{candidate}"
    steps_key, steps = _find_steps(text, where)
    index = _find_step(steps, where)
    step = steps.value[index]
    if steps.flow_style:
        edits = [_replace_sequence(text, steps_key, steps, index, settings)]
    elif step.flow_style:
        edits = [(step.start_mark.index, step.end_mark.index, _render(settings, step.start_mark.column))]
    else:
        edits = _edit_step(text, step, settings, where)
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    _check(text, where, index, settings)
    return text


def tabulate(proposals: Sequence[LayerProposal]) -> str:
    """Return a table, a row a layer, with a line that sums it up."""
    counts = Counter(p.algorithm for p in proposals if p.can_run_winograd)
    width = max((len(p.layer) for p in proposals), default=0)
    rows = [f"{p.layer:<{width}}  {NAMES[p.algorithm]:<6}  {p.dtype:<8}  {p.reason}" for p in proposals]
    summary = ", ".join(f"{num} {NAMES[algorithm]}" for algorithm, num in counts.most_common()) or "none"
    saved = f"{100 * find_saved_fraction(proposals):.0f} % of the multiplications of all {len(proposals)} convolutions"
    return "\n".join([*rows, f"3x3 convolutions with stride 1: {summary}; {saved} are saved"])


def _find_steps(text: str, where: str) -> tuple[Node, SequenceNode]:
    """Return the key and the value of a candidate's steps."""
    node: Node | None = YAML(typ="safe", pure=True).compose(text)
    key: Node | None = None
    for name in [*where.split("."), "steps"]:
        pairs = node.value if isinstance(node, MappingNode) else []
        if isinstance(node, MappingNode) and node.flow_style:
            raise SettingsError(f"{where}: expected the candidate on lines of its own, got it in braces; lay it out so")
        key, node = next(((k, v) for k, v in pairs if k.value == name), (None, None))
    if key is None or not isinstance(node, SequenceNode):
        raise SettingsError(f"{where}: expected a candidate with a list of steps, found none")
    return key, node


def _find_step(steps: SequenceNode, where: str) -> int:
    for index, step in enumerate(steps.value):
        if isinstance(step, MappingNode) and any(k.value == "kind" and v.value == _KIND for k, v in step.value):
            return index
    raise SettingsError(
        f"{where}.steps: expected a step of kind {_KIND}, found none; add "
        f"`- {{kind: {_KIND}, algorithm: direct, dtype: float32}}`"
    )


def _replace_sequence(text: str, key: Node, steps: SequenceNode, index: int, settings: Mapping[str, Any]) -> Edit:
    """Lay steps that stand in brackets out on lines; what the others say stays as it is."""
    column = key.start_mark.column + len(_INDENT)
    rendered = [text[step.start_mark.index : step.end_mark.index] for step in steps.value]
    rendered[index] = _render(settings, column + len(_INDENT))
    lines = "".join(f"\n{' ' * column}- {step}" for step in rendered)
    return text.index(":", key.end_mark.index) + 1, steps.end_mark.index, lines


def _edit_step(text: str, step: MappingNode, settings: Mapping[str, Any], where: str) -> list[Edit]:
    """Replace the values of a step that stands on lines of its own."""
    entries = {key.value: (key, value) for key, value in step.value}
    if missing := [name for name in ("algorithm", "dtype") if name not in entries]:
        raise SettingsError(f"{where}.steps: expected {missing[0]} in the step {_KIND}, found none; add it")
    edits = [
        (value.start_mark.index, value.end_mark.index, settings[name])
        for name, (_, value) in entries.items()
        if name in ("algorithm", "dtype")
    ]
    rules = _render_rules(settings["rules"], step.start_mark.column)
    if "rules" in entries:
        key, value = entries["rules"]
        edits.append((key.start_mark.index, _end_of_line(text, _find_end(value)), rules))
    elif settings["rules"]:
        end = _end_of_line(text, _find_end(step))
        edits.append((end, end, f"\n{' ' * step.start_mark.column}{rules}"))
    return edits


def _find_end(node: Node) -> int:
    """Return where a node's last character is; a block's own mark is behind the comments that follow it."""
    if isinstance(node, (MappingNode, SequenceNode)) and not node.flow_style and node.value:
        last = node.value[-1]
        return _find_end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _render(settings: Mapping[str, Any], column: int) -> str:
    """Return the step's lines; the first is already where it belongs."""
    lines = [f"{name}: {settings[name]}" for name in ("kind", "algorithm", "dtype")]
    lines += [_render_rules(settings["rules"], column)] if settings["rules"] else []
    return f"\n{' ' * column}".join(lines)


def _render_rules(rules: Sequence[Mapping[str, Any]], column: int) -> str:
    if not rules:
        return "rules: []"
    lines = ["rules:"]
    for rule in rules:
        names = ", ".join(name if _PLAIN.fullmatch(name) else json.dumps(name) for name in rule["layers"])
        lines += [
            f"{_INDENT}- layers: [{names}]",
            f"{_INDENT}  algorithm: {rule['algorithm']}",
            f"{_INDENT}  dtype: {rule['dtype']}",
            f"{_INDENT}  reason: {json.dumps(rule['reason'])}",
        ]
    return f"\n{' ' * column}".join(lines)


def _check(text: str, where: str, index: int, settings: Mapping[str, Any]) -> None:
    """Read back what was written: a layout that was not foreseen must not become other settings."""
    node = YAML(typ="safe", pure=True).load(text)
    for name in where.split("."):
        node = node[name]
    written: dict[str, Any] = {"rules": []} | dict(node["steps"][index])
    if written != dict(settings):
        raise SettingsError(
            f"{where}.steps.{index}: expected a layout that can be rewritten, read back {written!r}; put "
            "each key on a line of its own"
        )
