"""What a language model starts with as a product: settings that its checkpoint allows, and cases in their format.

A model without a chat template is asked for likelihoods alone. The candidate is INT4 by rounding to nearest, as that
needs no texts; its groups are the largest that divide the inputs of every layer. Of a model that can't be quantised
here, such as a mixture of experts, it is the same weights once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.evalsets.examples import COLOURS, NUMBERS, build_evalset
from pipeline.product import Start
from pipeline.products.text.chat_templates import holds_chat_template, read_chat_templates
from pipeline.products.text.checkpoints import layer_shapes, open_checkpoint
from pipeline.products.text.model_config import find_positions, read_config, read_json
from pipeline.products.text.optimize.layers import GROUP_SIZES, plan_folder
from pipeline.products.text.step_settings import QuantizeStep
from pipeline.running.hub import locate_checkpoint

_MOST_CONTEXT, _MOST_ANSWER = 2048, 256  # tokens
_LARGE = 8 << 30  # bytes in float32: a larger model is served in 16 bits

_SECTION = """\
{name}:
  kind: text
  # all others are compared with it, case by case
  reference: {name}
  # what would ship: `dvc repro` fails unless the gate passes it
  release: [{candidate}]
  # these settings can change an answer
  serving:
    dtype: {dtype}  # bfloat16 and float16 flip near-tied tokens with the batch
    continuous_batching: true
    concurrency: 8  # requests in flight per server
    num_threads: 1  # torch threads per server
    context_length: {context}  # tokens
    max_tokens: {answer}  # completion tokens a request
  # replace the cases by your own, or name a single lm-eval task: {{kind: harness, task: arc_easy}}
  evals:
{evals}
  gate:
    alpha: 0.05  # one-sided, per release
    on_inconclusive: block  # or warn
    # The loss that you tolerate: of a rate 0.03 is 3 points, of a perplexity 3 %. It must be proven, and 32 cases prove
    # no less of a rate. A supporting one must not be seen beyond it
    tolerances:
{tolerances}
"""
_REFERENCE = """\
{name}: {{product: {name}, checkpoint: {checkpoint}, steps: []}}
"""
_INT4 = """\
{name}-int4:
  product: {name}
  checkpoint: {checkpoint}
  steps:
    - kind: quantize
      algorithm: rtn  # round to nearest; gptq and awq lose less, and need a `calibration`
      scheme: W4A16  # weights of 4 bits, inputs as they are
      group_size: {group_size}  # input channels that share a scale
      exclude: {exclude}
"""
_AGAIN = """\
# {reason}
{name}-again: {{product: {name}, checkpoint: {checkpoint}, steps: []}}
"""
_TASK = """\
task: {folder.name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/cases.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: " "  # between question and choice
metric_list:
  - metric: acc
"""
_TOOL = {
    "description": "Book a room.",
    "parameters": {
        "type": "object",
        "properties": {"room": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["room", "people"],
    },
}
_FORM = ' Answer with this alone: {"name": "book", "arguments": {"room": ROOM, "people": NUMBER}}'


@dataclass(frozen=True)
class _Example:
    """An eval, its tolerance, and its files."""

    settings: str
    tolerance: str
    files: dict[Path, bytes]


def start_text(name: str, checkpoint: str, root: Path) -> Start:
    """Return what a language model starts with.

    Args:
        name: of the product.
        checkpoint: a folder of the project, or hf://ORG/NAME@REVISION.
        root: of the project.

    Raises:
        QuantgateError: the checkpoint can't be used.
    """
    folder = locate_checkpoint(checkpoint, root)
    num_elements = sum(tensor.num_elements for tensor in open_checkpoint(folder).values())
    context = _choose_context(folder)
    candidate, chosen, warnings = _choose_candidate(name, checkpoint, folder)
    examples = _choose_examples(name, folder)
    section = _SECTION.format(
        name=name,
        candidate=candidate,
        dtype="bfloat16" if 4 * num_elements > _LARGE else "float32",
        context=context,
        answer=min(_MOST_ANSWER, context // 4),
        evals="\n".join(f"    {example.settings}" for example in examples),
        tolerances="\n".join(f"      {example.tolerance}" for example in examples),
    )
    candidates = _REFERENCE.format(name=name, checkpoint=checkpoint) + chosen
    files = {path: data for example in examples for path, data in example.files.items()}
    return Start(section, candidates, files, warnings)


def _choose_candidate(name: str, checkpoint: str, folder: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return the name of what would ship, its section, and why it is the reference once more where it is."""
    try:
        step = choose_step(folder)
    except QuantizationError as error:
        reason = " ".join(f"not quantised: {error}".split())
        own = _AGAIN.format(name=name, checkpoint=checkpoint, reason=reason)
        return f"{name}-again", own, (f"{name}-again: {reason}",)
    exclude = f"[{', '.join(step.exclude)}]"
    section = _INT4.format(name=name, checkpoint=checkpoint, group_size=step.group_size, exclude=exclude)
    return f"{name}-int4", section, ()


def _choose_context(folder: Path) -> int:
    return min(find_positions(read_config(folder)) or _MOST_CONTEXT, _MOST_CONTEXT)


def choose_step(folder: Path) -> QuantizeStep:
    """Return the step with the largest groups that divide the inputs of every layer."""
    exclude = ["lm_head"] if "lm_head" in layer_shapes(folder) else []
    for size in GROUP_SIZES:
        step = QuantizeStep(kind="quantize", scheme="W4A16", group_size=size, exclude=exclude)
        try:
            plan_folder(folder, step)
            return step
        except QuantizationError:
            if size == GROUP_SIZES[-1]:
                raise
    raise AssertionError("a group size is there")


def _choose_examples(name: str, folder: Path) -> list[_Example]:
    """Return the evals that a model can be asked: by its chat template, and by the tokens that it has."""
    path = folder / "tokenizer_config.json"
    tokenizer = read_json(path) if path.is_file() else {}
    templates = [text for _, text in read_chat_templates(folder, tokenizer)] if holds_chat_template(folder) else []
    knows_tools = any("tools" in text for text in templates)
    examples = [_build_calls(name, knows_tools=knows_tools) if any(templates) else _build_choices(name)]
    if tokenizer.get("bos_token") or tokenizer.get("eos_token"):  # perplexity puts one before each text
        examples.append(_build_documents(name))
    return examples


def _build_documents(name: str) -> _Example:
    folder = Path("evalsets") / f"{name}-documents"
    cases = [
        _name_case("note", i)
        | {"text": f"The {colour} parcel came back on Monday. It had {n} labels, and none was ours."}
        for i, (colour, n) in enumerate(product(COLOURS, NUMBERS), 1)
    ]
    return _Example(
        f"documents: {{kind: perplexity, evalset: {folder}}}",
        "documents/perplexity_per_token: {overall: 0.02, tier: supporting}",
        build_evalset(folder, cases, kind="documents", cluster="a note"),
    )


def _build_choices(name: str) -> _Example:
    folder = Path("evalsets") / f"{name}-choices"
    cases = [
        _name_case("question", i)
        | {
            "question": f"Q: There are {n} {colour} lamps, and one breaks. How many are left?\nA:",
            "choices": [str(n + 1), str(n - 1)],
            "answer": 1,
        }
        for i, (colour, n) in enumerate(product(COLOURS, NUMBERS), 1)
    ]
    files = build_evalset(folder, cases, kind="choices", cluster="a question")
    task = {folder / f"{folder.name}.yaml": _TASK.format(folder=folder).encode()}
    return _Example(
        f"choices: {{kind: harness, task: {folder.name}, include_path: {folder}}}",
        "choices/accuracy: {overall: 0.16}",
        files | task,
    )


def _build_calls(name: str, *, knows_tools: bool) -> _Example:
    """Return single tool calls; a template without a place for tools gets the form of a call in the question."""
    folder = Path("evalsets") / f"{name}-calls"
    form = "" if knows_tools else _FORM
    cases = [
        _name_case("call", i)
        | {
            "messages": [{"role": "user", "content": f"Book the {colour} room for {n} people.{form}"}],
            "expected": {"name": "book", "arguments": {"room": colour, "people": n}},
        }
        for i, (colour, n) in enumerate(product(COLOURS, NUMBERS), 1)
    ]
    tools = ", send_tools: true" if knows_tools else ""
    return _Example(
        f"calls: {{kind: tool_calls, evalset: {folder}{tools}}}",
        "calls/tool_call_accepted_rate: {overall: 0.16}",
        build_evalset(folder, cases, kind="tool_calls", cluster="a request", tools={"book": _TOOL}),
    )


def _name_case(word: str, number: int) -> dict[str, Any]:
    """Return what a case has that shares nothing with another."""
    return {"id": f"{word}-{number}", "cluster": f"{word}-{number}"}
