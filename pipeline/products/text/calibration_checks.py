"""Check calibration texts against the steps that draw from them and against what is evaluated, before any work.

Texts count as equal but for white space at their ends. Not covered: a text that holds a case's text among others, such
as a conversation in a chat template, and tasks of lm-eval without a card. The number of tokens is counted by the step,
as loading the tokenizer takes longer than all checks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.evalsets.cards import Evalset
from pipeline.evalsets.cases import (
    CASES_FILE,
    AnswerCase,
    Case,
    ChoiceCase,
    DocumentCase,
    ToolCallCase,
    TrajectoryCase,
)
from pipeline.products.text.settings import HarnessEval, TextProduct
from pipeline.products.text.step_settings import Calibration, WeightStep


def check_calibration(where: str, asked: Calibration, texts: Evalset) -> None:
    """Refuse sources that the texts lack, and more samples than there are texts.

    Args:
        where: path of the key `calibration`.
        asked: its settings.
        texts: calibration texts.

    Raises:
        SettingsError: with the path of the key.
    """
    for source in asked.sources:
        if source not in texts.card.buckets:
            raise SettingsError(
                f"{where}.sources: {source!r} is no bucket of the calibration texts; "
                f"they have {', '.join(texts.card.buckets) or 'none'}"
            )
    num_texts = sum(not set(asked.sources).isdisjoint(case.buckets) for case in texts.cases)
    if asked.num_samples > num_texts and not asked.length_exponent:  # which asks for longer texts more than once
        raise SettingsError(
            f"{where}.num_samples: expected at most {num_texts}, the texts of {', '.join(asked.sources)}, got "
            f"{asked.num_samples}: each would be repeated; lower it, or name more sources"
        )


def check_unevaluated(
    product: TextProduct, texts: Evalset | None, evalsets: Mapping[str, Evalset | None], root: Path
) -> None:
    """Refuse texts that a step calibrates on and an eval asks: the loss of what was fitted to them looks too small.

    Args:
        product: settings.
        texts: calibration texts; None: there are none.
        evalsets: by eval; None stands for one whose cases are elsewhere.
        root: of the project.

    Raises:
        SettingsError: with the number of such cases, the first of them, and both files.
    """
    sources = {source for _, asked in _list_calibrations(product) for source in asked.sources}
    if texts is None or not sources:
        return
    drawn = {case.text.strip(): case.id for case in texts.cases if not sources.isdisjoint(case.buckets)}
    for name, evalset in evalsets.items():
        both = [(case.id, text) for case in (evalset.cases if evalset else ()) for text in _list_texts(case)]
        both = [(case_id, text) for case_id, text in both if text.strip() in drawn]
        if both:
            settings, (case_id, text) = product.evals[name], both[0]
            folder = settings.include_path if isinstance(settings, HarnessEval) else settings.evalset
            raise SettingsError(
                f"{product.locate('optimize.calibration_texts')}: expected texts that no eval asks, as a quantiser "
                f"fits what it is calibrated on, got {len(both):,} of evals.{name}: {drawn[text.strip()]!r} of "
                f"{root / str(product.optimize.calibration_texts) / CASES_FILE} is case {case_id!r} of "
                f"{root / str(folder) / CASES_FILE}; take them out of one of both"
            )


def _list_texts(case: Case) -> tuple[str, ...]:
    """Return what a case puts before a model, without what cases may share, such as a system's message."""
    if isinstance(case, DocumentCase):
        return (case.text,)
    if isinstance(case, ChoiceCase | AnswerCase):
        return (case.question,)
    if isinstance(case, ToolCallCase | TrajectoryCase):
        return tuple(message.content for message in case.messages if message.role == "user")[:1]
    return ()


def warn_of_calibration(product: TextProduct) -> list[str]:
    """Return a line for each step that a single text would calibrate."""
    return [
        f"{where}.num_samples: expected several texts, got 1, which all scales would fit then; raise it"
        for where, asked in _list_calibrations(product)
        if asked.num_samples == 1
    ]


def _list_calibrations(product: TextProduct) -> Iterator[tuple[str, Calibration]]:
    """Yield the calibration of each step that has one, behind the path of its key."""
    for name, candidate in product.candidates.items():
        for i, step in enumerate(candidate.steps):
            if isinstance(step, WeightStep) and step.calibration is not None:
                yield f"candidates.{name}.steps.{i}.calibration", step.calibration
