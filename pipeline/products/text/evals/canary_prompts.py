"""Which prompts the canary asks: the first turn of a case, or one of an lm-eval task that is answered in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.evalsets.cards import Evalset
from pipeline.evalsets.cases import ToolCallCase, TrajectoryCase, spread
from pipeline.products.text.evals import generation
from pipeline.products.text.evals.calls import declare_tools
from pipeline.products.text.evals.generation import Question
from pipeline.products.text.settings import ChatEval, EvalSettings


@dataclass(frozen=True)
class Prompt:
    """One prompt of the canary."""

    case_id: str  # "<eval>/<case>"
    digest: str
    content: generation.Content
    tools: list[dict[str, Any]] | None = None
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None  # where the task has a limit of its own


def pick_prompts(
    evals: Mapping[str, tuple[EvalSettings, Evalset | None]],
    num_prompts: int,
    *,
    questions: Mapping[str, Sequence[Question]] = {},
    is_plain: bool = False,
) -> list[Prompt]:
    """Return prompts of cases spread evenly over the evals that generate text, as many as asked for where there are.

    Args:
        evals: settings and cases, by name.
        num_prompts: how many.
        questions: of the tasks that have any, by the eval's name.
        is_plain: whether these are sent as they stand.
    """
    sources: list[tuple[Sequence[Any], Callable[[Any], Prompt]]] = []
    for name, (settings, evalset) in evals.items():
        if isinstance(settings, ChatEval) and evalset is not None:
            tools = declare_tools(evalset.card.tools, settings)
            sources.append((evalset.cases, partial(_ask_first_turn, name, tools)))
        elif name in questions:
            sources.append((questions[name], partial(_ask_question, name, is_plain)))
    shares = _share_out(num_prompts, [len(cases) for cases, _ in sources])
    return [build(case) for (cases, build), count in zip(sources, shares, strict=True) for case in spread(cases, count)]


def _ask_first_turn(name: str, tools: list[dict[str, Any]] | None, case: ToolCallCase | TrajectoryCase) -> Prompt:
    return Prompt(f"{name}/{case.id}", case.digest, [m.model_dump() for m in case.messages], tools)


def _ask_question(name: str, is_plain: bool, question: Question) -> Prompt:
    content = question.build_content(is_plain=is_plain)
    return Prompt(f"{name}/{question.case_id}", question.digest, content, None, question.stops, question.max_tokens)


def _share_out(total: int, sizes: Sequence[int]) -> list[int]:
    """Share a number out evenly, to none more than its size: what one can't take goes to the others."""
    shares = [0] * len(sizes)
    while (left := total - sum(shares)) and (takers := [i for i, size in enumerate(sizes) if shares[i] < size]):
        for place, i in enumerate(takers):
            shares[i] = min(sizes[i], shares[i] + left // len(takers) + (place < left % len(takers)))
    return shares
