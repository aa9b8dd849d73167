"""lm-eval's `samples_<task>_<date>.jsonl`, as `--log_samples` writes them.

A line is one document under one filter. Its metrics are named as lm-eval's tables name them: `acc`, and
`exact_match,strict-match` where the filter has a name. RULER's are named by lengths, of which a document has one: its
score is `score`, and its bucket `max_length/<length>`. The case is the document, its prompt, its target and the
arguments of the requests (few-shot texts, chat template, stop strings and length limits are in there), so two sides
that were asked otherwise do not pair. `results_<date>.json` beside the samples, where it is, tells which direction is
better, the version and filters of the task, and the model: samples name none, so those of two that answer alike are
equal. With `--output_path x.json` its name is `x_<date>.json`. Read without lm-eval.

Not covered: metrics that lm-eval computes from all documents together (bleu, f1 of a corpus): no case has a score of
its own. Files of lm-eval before 0.4.3 have no hashes and are refused.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.outcomes.cases import (
    Case,
    Direction,
    Grouping,
    Outcomes,
    build_outcomes,
    condense_case,
    condense_scores,
    digest_asked,
    read_number,
)
from pipeline.outcomes.questions import digest_part
from pipeline.outcomes.reading import iterate_objects, map_texts, parse_json, read_first_keys
from pipeline.records.evaluations import count_choices
from pipeline.records.files import read_bounded
from pipeline.settings.metrics import MetricDefinition

FORMAT = "lm_eval"
_DATE = r"(?P<date>\d{4}-\d\d-\d\dT[\d.:-]+)"
_NAME = re.compile(rf"samples_(?P<task>.+)_{_DATE}")
_RESULTS = re.compile(rf"(?!samples_)(?P<name>.+)_{_DATE}\.json")
_HASHES = {"document": "doc_hash", "prompt": "prompt_hash", "target": "target_hash"}
_FIELDS = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", *_HASHES.values()}
_LENGTH, _SCORE = "max_length", "score"  # RULER's field of a document, and how its score is named here
_ADDRESS = r" at 0x[0-9a-fA-F]+"  # of `<function f at 0x7f..>`
# their cases are [log-likelihood in nats, units]: the scale that turns it into what is divided by the units
_LIKELIHOODS = {"word_perplexity": 1.0, "byte_perplexity": 1.0, "bits_per_byte": 1 / math.log(2), "perplexity": 1.0}


def recognizes(path: Path) -> bool:
    """Say whether the first line of a JSONL file looks like a sample of lm-eval."""
    return path.suffix.lower() == ".jsonl" and {"doc_id", "filter"} <= read_first_keys(path)


def is_results(path: Path) -> bool:
    """Say by a file's name whether lm-eval computed it from samples; under a name of one's own they lie beside it."""
    named = _RESULTS.fullmatch(path.name)
    return named is not None and (
        named["name"] == "results" or any(path.parent.glob(f"samples_*_{named['date']}.jsonl"))
    )


def read(path: Path, grouping: Grouping) -> Outcomes:
    """Read one task's samples.

    Raises:
        EvidenceError: a line is malformed, a document is there twice under one filter, or two results
            files lie beside it.
    """
    places: dict[tuple[int, str], str] = {}
    documents: dict[int, Case] = {}
    definitions: dict[str, MetricDefinition] = {}
    for where, sample in iterate_objects(path):
        _check(sample, where)
        doc_id, name = sample["doc_id"], sample["filter"]
        if first := places.get((doc_id, name)):
            raise EvidenceError(
                f"{where}: document {doc_id} is there twice under the filter {name!r}, first in "
                f"{first}; every case may count once"
            )
        places[doc_id, name] = where
        if doc_id not in documents:
            documents[doc_id] = condense_case(_read_case(sample, where), grouping)
        elif documents[doc_id].asked != digest_asked(_list_asked(sample)):
            raise EvidenceError(
                f"{where}: document {doc_id}: expected what it asks under its first filter, got "
                f"something else under {name!r}; are these samples of two runs? Run the task again"
            )
        documents[doc_id].scores |= condense_scores(_read_scores(sample, definitions))
    cases = list(documents.values())
    named = _NAME.fullmatch(path.stem)
    task = named["task"] if named else path.stem
    results = _read_results(path, named["date"]) if named else {}
    facts, better = _describe_task(results, task)
    facts |= {"task": task} if named else {}
    return build_outcomes(
        task,
        path,
        cases,
        format=FORMAT,
        task=facts,
        better={
            name: better[name.partition(",")[0]]
            for case in cases
            for name in case.scores
            if name.partition(",")[0] in better
        },
        definitions=definitions,
        model=_digest_model(results),
    )


def _check(sample: dict[str, Any], where: str) -> None:
    missing = [key for key in ("doc_id", "filter", *_HASHES.values()) if key not in sample]
    if missing:
        raise EvidenceError(
            f"{where}: expected a sample of lm-eval 0.4.3 or newer, found none of its key "
            f"{missing[0]!r}; run the task again with --log_samples"
        )
    if type(sample["doc_id"]) is not int or not isinstance(sample["filter"], str):
        raise EvidenceError(
            f"{where}: expected a number as doc_id and a name as filter, got {sample['doc_id']!r} and "
            f"{sample['filter']!r}"
        )


def _read_scores(sample: dict[str, Any], definitions: dict[str, MetricDefinition]) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for metric, value in _list_values(sample).items():
        full = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
        scores |= _read_score(full, metric, value, definitions)
    return scores


def _list_values(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what a sample scores by metric; RULER names its metrics by lengths, and gives -1 to all but its own."""
    found = {metric: sample[metric] for metric in sample.keys() - _FIELDS}
    if (length := _find_length(sample)) is None:
        return found
    return {metric: value for metric, value in found.items() if not metric.isdecimal()} | {_SCORE: found[length]}


def _find_length(sample: dict[str, Any]) -> str | None:
    """Return the length that names the score of a document of RULER; None: it is another task's."""
    length = str(_find(sample, "doc", _LENGTH))
    return length if length.isdecimal() and length in sample else None


def _read_case(first: dict[str, Any], where: str) -> Case:
    """Read a document from the first of its samples, without scores."""
    document = first["doc"] if isinstance(first.get("doc"), dict) else {}
    buckets, length = document.get("buckets"), _find_length(first)
    return Case(
        str(first["doc_id"]),
        where,
        _list_asked(first),
        {},
        tells=(("document",), ("request",)),
        cluster=str(_digest_document(first) if document.get("cluster") is None else document["cluster"]),
        buckets=(
            *(map(str, buckets) if isinstance(buckets, list) else ()),
            *((f"{_LENGTH}/{length}",) if length else ()),
        ),
        prompt=next((str(request["arg_0"]) for request in _list_requests(first) if "arg_0" in request), ""),
        output=_describe_answer(first),
        num_choices=count_choices(first, sum("arg_1" in request for request in _list_requests(first))),
        fields=document,
    )


def _list_asked(sample: dict[str, Any]) -> dict[str, Any]:
    hashes = {part: sample[key] for part, key in _HASHES.items()}
    return hashes | {"document": _digest_document(sample), "request": sample.get("arguments")}


def _digest_document(sample: dict[str, Any]) -> Any:
    """Return lm-eval's hash of a document; where pictures or sound go with it, that is of their addresses in memory.

    The document as it is written holds a hash of each picture.
    """
    has_media = any("arg_2" in request for request in _list_requests(sample))
    return digest_part(sample["doc"]) if has_media and "doc" in sample else sample["doc_hash"]


def _read_score(name: str, metric: str, value: Any, definitions: dict[str, MetricDefinition]) -> dict[str, Any]:
    """Return the score of a case, and what it is divided by where it is a likelihood."""
    if metric == "perplexity":  # LAMBADA's: of a case the log-likelihood of its one target
        likelihood = read_number(value)
        if likelihood is not None and likelihood > 0:
            return {name: value}  # a task's own, of each case
        value = [value, 1]
    elif metric not in _LIKELIHOODS:
        return {name: value}
    scale, weight = _LIKELIHOODS[metric], f"{name} units"
    is_relative = metric.endswith("perplexity")
    definitions[name] = MetricDefinition(
        name,
        "ratio",
        name,
        "lower",
        "" if is_relative else "bit/byte",
        harm="relative" if is_relative else "absolute",
        weight=weight,
    )
    pair = value if isinstance(value, list) and len(value) == 2 else [None, None]
    likelihood = read_number(pair[0])
    return {name: None if likelihood is None else -likelihood * scale, weight: pair[1]}


def _list_requests(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each request of a sample: its prompt, and a continuation or settings."""
    arguments = sample.get("arguments")
    found = arguments.values() if isinstance(arguments, dict) else ()
    return [request for request in found if isinstance(request, dict)]


def _describe_answer(sample: dict[str, Any]) -> str:
    """Return the text that was generated, or the likeliest choice; empty where neither can be told."""
    responses, requests = sample.get("resps"), _list_requests(sample)
    first = [r[0] if isinstance(r, list) and r else None for r in responses] if isinstance(responses, list) else []
    if len(first) == 1 and isinstance(first[0], str):
        return first[0] if requests and "arg_1" in requests[0] else ""  # of a whole text there is but its likelihood
    likelihoods = [read_number(r[0]) if isinstance(r, list) and r else None for r in first]
    if not likelihoods or None in likelihoods or len(likelihoods) != len(requests):
        return ""
    best = max(range(len(likelihoods)), key=lambda i: likelihoods[i] or 0.0)
    # of choices within the question, as winogrande has them, what follows is the same
    part = "arg_1" if len({str(request.get("arg_1", "")) for request in requests}) > 1 else "arg_0"
    return str(requests[best].get(part, "")).strip()


def _describe_code(config: Any) -> Any:
    """Return the source of a task's function that judges answers; None where nobody knows it."""
    if not isinstance(config, dict):
        return None
    code = config.get("process_results", "its metrics alone")
    return None if re.fullmatch(f"<.*{_ADDRESS}>", str(code)) else code


def _drop_addresses(text: str) -> str:
    """Return a setting without the addresses of functions: they are another in each run."""
    return re.sub(_ADDRESS, "", text)


def _read_results(samples: Path, date: str) -> Any:
    """Read lm-eval's results file; {} where there is none."""
    found = sorted(path for path in samples.parent.glob(f"*_{date}.json") if path.is_file() and is_results(path))
    if len(found) > 1:
        raise EvidenceError(
            f"{samples}: expected one results file beside it, found {' and '.join(path.name for path in found)}; "
            "remove what lm-eval did not write"
        )
    return parse_json(read_bounded(found[0]), str(found[0])) if found else {}


def _find(results: Any, *keys: str) -> Any:
    for key in keys:
        results = results.get(key) if isinstance(results, dict) else None
    return results


def _digest_model(results: Any) -> str | None:
    """Return a digest of which model the results name; None where they name none, or a cache may have answered.

    lm-eval's cache asks nothing of the model for what another one has answered.
    """
    kind, arguments, cache = (_find(results, "config", key) for key in ("model", "model_args", "use_cache"))
    return digest_part(map_texts([kind, arguments], _drop_addresses)) if arguments and not cache else None


def _describe_task(results: Any, task: str) -> tuple[dict[str, Any], dict[str, Direction]]:
    """Return what the results tell of a task: what both sides must share, and the better directions."""
    facts = {
        "version": _find(results, "versions", task),
        "filters": _find(results, "configs", task, "filter_list"),
        "repeats": _find(results, "configs", task, "repeats"),
        "metrics": _find(results, "configs", task, "metric_list"),
        "judging": _describe_code(_find(results, "configs", task)),
    }
    directions = _find(results, "higher_is_better", task)
    better: dict[str, Direction] = {
        _SCORE if metric.isdecimal() else metric: "higher" if is_higher else "lower"
        for metric, is_higher in (directions.items() if isinstance(directions, dict) else ())
        if isinstance(is_higher, bool)
    }
    return {key: map_texts(value, _drop_addresses) for key, value in facts.items() if value is not None}, better
