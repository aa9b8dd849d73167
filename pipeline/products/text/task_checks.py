"""What a loaded lm-eval task tells of params.yaml, before any model runs: can its cases prove a tolerance, does a text
come of it, and can each candidate be asked?

Tasks that lie in their folder are loaded once (`evals/known_tasks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.evalsets.cards import CARD_FILE
from pipeline.gate.plan import check_plan, plan_gate
from pipeline.gate.preflight import check_cases
from pipeline.gate.suite_sizes import count_sizes
from pipeline.gate.wording import use_metrics
from pipeline.products.text.chat_templates import TEMPLATE_FILE, has_chat_template, holds_chat_template
from pipeline.products.text.evals.known_tasks import KnownTask
from pipeline.products.text.problems import find_unanswered
from pipeline.products.text.settings import TextProduct
from pipeline.running.hub import locate_checkpoint


def check_tasks(product: TextProduct, tasks: Mapping[str, KnownTask], root: Path) -> list[str]:
    """Check the lm-eval tasks of a product; return warnings.

    They are of each folder of tasks without a card, and of each tolerance that can't be proven and need not be.

    Args:
        product: settings.
        tasks: of `describe_tasks`.
        root: of the project.

    Raises:
        SettingsError: a task can't prove what must be proven, or can't be asked of a candidate; asks
            something else than at the last release; or something needs texts of the model, and no eval has it write
            any.
    """
    check_cases(product, {name: task.digest for name, task in tasks.items()}, root)
    in_words = [name for name, task in tasks.items() if task.is_answered_in_words]
    if not in_words and not product.chat_evals and (problems := find_unanswered(product)):
        raise SettingsError("; ".join(map(product.locate, problems)))
    has_template = has_chat_template(product, root)
    if in_words and has_template:
        _check_templates(product, root, in_words[0])
    plain = [] if has_template or not in_words else [_tell_plain(product, in_words[0])]
    return [*plain, *warn_of_missing_cards(product, root), *_check_sizes(product, tasks)]


def warn_of_missing_cards(product: TextProduct, root: Path) -> list[str]:
    """Return a line for each folder of tasks whose cases nothing guards."""
    return [
        f"{product.locate(f'evals.{name}')}.include_path: {settings.include_path} has no {CARD_FILE}, so nothing "
        "notices a case that is edited, or that is asked twice and proves more than it does; describe its cases in one "
        "(evalsets/README.md), and run `python -m evalsets.seal` on the folder"
        for name, settings in product.task_evals.items()
        if settings.include_path is not None and not (root / settings.include_path / CARD_FILE).is_file()
    ]


def _tell_plain(product: TextProduct, eval_name: str) -> str:
    """Say that models are asked by plain prompts: one that was trained in chats answers hardly anything so."""
    checkpoint = product.candidates[product.reference].checkpoint
    return (
        f"{product.locate(f'evals.{eval_name}')}: asked by plain prompts, as {checkpoint} has no chat template: right "
        f"for a base model; for one that chats copy {TEMPLATE_FILE} from its source"
    )


def _check_templates(product: TextProduct, root: Path, eval_name: str) -> None:
    for name, candidate in product.candidates.items():
        folder = locate_checkpoint(candidate.checkpoint, root)
        if not candidate.engine.is_attached and not holds_chat_template(folder):
            raise SettingsError(
                f"candidates.{name}.checkpoint: expected a chat template, as the reference {product.reference} has one "
                f"and {eval_name} is answered in words, found none in {folder}; copy the reference's"
            )


def _check_sizes(product: TextProduct, tasks: Mapping[str, KnownTask]) -> list[str]:
    sizes = {
        name: count_sizes(*zip(*task.documents, strict=True), confidence=1 - product.gate.alpha)
        for name, task in tasks.items()
        if task.documents
    }
    with use_metrics(product.metrics):
        rows = [row for row in plan_gate(product, sizes, None) if row.metric.partition("/")[0] in sizes]
        return check_plan(product, rows)
