"""How an lm-eval task judges answers: the metric that counts, and whether a right answer could be right at all.

That is tried on answers made for it, so that a task which can't judge, or cuts what is right, is told before any work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from pipeline.errors import QuantgateError, SettingsError, show_value
from pipeline.products.text.evals.generation import GENERATE, cut, name_case, read_question

ACCURACY_METRICS = ("acc", "exact_match")  # 0 or 1 per document
_MOST = 0.5  # of a task's answers
_SCORE = {"loglikelihood": (-1.0, False), "loglikelihood_rolling": -1.0}  # made answers, by the kind of request


def check_judge(name: str, task_name: str, task: Any) -> None:
    """Have a task judge an answer to its first document: the target, or scores.

    Raises:
        SettingsError: it can't, or none of its metrics is known.
    """
    first = [request for request in task.instances if request.doc_id == task.instances[0].doc_id]
    if first:
        with explain_problems(name, f"judge {task.OUTPUT_TYPE} answers by the metrics of", task_name):
            _judge(name, task_name, task, first, _list_targets(task, first[0].doc)[0])


def check_ends(name: str, task_name: str, task: Any) -> None:
    """Refuse stop strings that most right answers of a task hold, so that they are cut and wrong.

    Raises:
        SettingsError: names the first of them and the string.
    """
    asked = [request for request in task.instances if request.request_type == GENERATE]
    stopped = []
    for request in asked:
        stops = read_question(name, request).stops
        texts = _list_targets(task, request.doc)
        if all(any(stop in text for stop in stops) for text in texts):
            stopped.append((request, texts[0], stops))
    if len(stopped) <= _MOST * len(asked):
        return  # to judge them takes seconds
    of_document: dict[Any, list[Any]] = {}
    for request in task.instances:
        of_document.setdefault(request.doc_id, []).append(request)
    wrong = []
    for request, text, stops in stopped:
        answers = text, cut(text, stops)
        whole, ended = (_judge(name, task_name, task, of_document[request.doc_id], answer) for answer in answers)
        if whole > ended:
            wrong.append((request, text, stops))
    if len(wrong) > _MOST * len(asked):
        request, text, stops = wrong[0]
        stop = next(stop for stop in stops if stop in text)
        raise SettingsError(
            f"evals.{name}.task: {task_name} ends each answer at {stop!r} (generation_kwargs.until), so that "
            f"{len(wrong)} of its {len(asked)} right answers are cut and wrong, first that of case "
            f"{name_case(task_name, request.doc, request.doc_id)!r}: {show_value(text)}; take the string out of until, "
            "or out of the answers"
        )


def _list_targets(task: Any, document: Any) -> list[str]:
    """Return the right answers to a document, one or more."""
    target = task.doc_to_target(document)
    return list(map(str, target)) if isinstance(target, list) and target else [str(target)]


def _judge(name: str, task_name: str, task: Any, requests: Sequence[Any], text: str) -> float:
    """Return the score of a text, or of made scores, as the answers to a document's requests."""
    for request in requests:
        request.resps = [_SCORE.get(request.request_type, text)]
    with mock.patch.object(task, "_instances", requests):
        task.apply_filters()
    scores = []
    for read in [*requests[0].filtered_resps]:
        judged = task.process_results(requests[0].doc, [request.filtered_resps[read] for request in requests])
        scores.append(find_score(name, task_name, judged)[1])
    return max(scores, default=0.0)


def find_score(name: str, task_name: str, judged: Mapping[str, Any]) -> tuple[str, float]:
    """Return the metric that judges a case, and what it gives.

    Args:
        name: of the eval.
        task_name: whose answer was judged.
        judged: by metric.

    Raises:
        SettingsError: none of the metrics is known, or it gives no number, as it judges answers of another kind.
    """
    metric = next((metric for metric in ACCURACY_METRICS if metric in judged), None)
    if metric is None:
        raise SettingsError(
            f"evals.{name}.task: {task_name} has the metrics {', '.join(judged)}; expected one of "
            f"{', '.join(ACCURACY_METRICS)}"
        )
    try:
        return metric, float(judged[metric])
    except (TypeError, ValueError):
        raise SettingsError(
            f"evals.{name}.task: {task_name} has the metric {metric}, which gives {show_value(judged[metric])} for an "
            "answer, expected a number; name a metric that judges answers of the task's output_type"
        ) from None


@contextlib.contextmanager
def explain_problems(name: str, verb: str, task: str) -> Iterator[None]:
    """Turn an exception in lm-eval into one line, as a task is full of templates and code."""
    try:
        yield
    except QuantgateError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise SettingsError(
            f"evals.{name}.task: lm-eval can't {verb} {task!r}: {type(error).__name__}: {reason}"
        ) from error
