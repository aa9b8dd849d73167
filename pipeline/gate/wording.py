"""How numbers, harms and names are written for people: points for rates, percent for relative harms.

Names of cases and buckets, failures and outputs are other people's texts: what would break a table, forge a heading
or steer a terminal (`plain_text.py`) is made visible where it is shown, and stays as it is in records and verdicts.
Rounding happens here and nowhere else; decisions are taken on the numbers before they come here.
Free of numpy, because the stage that decides the exit code prints through it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from pipeline.records.plain_text import show_unprintable as show_unprintable
from pipeline.records.verdicts import Comparison
from pipeline.settings.metrics import MetricDefinition

_MAX_DIGITS = 6  # behind the point of a percentage
# A backtick has no escape that reads well inside and outside of code, and messages quote commands with it.
_IN_MARKDOWN = str.maketrans({"&": "&amp;", "|": "&#124;", "*": "&#42;", "$": "&#36;", "~": "&#126;", "`": "'"})
_BACKSLASH = re.compile(r"\\(?=[!-/:-@\[-`{-~]|$)")  # before punctuation, an entity's "&" too, it would hide itself
_EMPHASIS = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # not within a word
# GitHub makes links of @name, #12, GH-12, http:// and www. and tells people of them; a space without width prevents it
_LINKED = re.compile(r"(?<!\w)@(?=\w)|(?<![\w&])#(?=\d)|\b[Gg][Hh]-(?=\d)|:(?=//)|\bwww(?=\.)")


_in_use: ContextVar[Mapping[str, MetricDefinition]] = ContextVar("the metrics that names stand for")


@contextmanager
def use_metrics(definitions: Mapping[str, MetricDefinition]) -> Iterator[None]:
    """Let names stand for these metrics until the end of the block: those of a product, or of records of others.

    Args:
        definitions: by "<eval>/<metric>", or by the metric's name alone for all evals.
    """
    token = _in_use.set(definitions)
    try:
        yield
    finally:
        _in_use.reset(token)


def definition_of(metric: str) -> MetricDefinition:
    """Return the definition of "<eval>/<metric>", of those in use."""
    definitions = _in_use.get()
    return definitions.get(metric) or definitions[metric.rpartition("/")[2]]


def is_rate(metric: str) -> bool:
    """Say whether a metric is a share in [0, 1], which is written in percent and compared in points."""
    definition = definition_of(metric)
    is_share = definition.estimator in ("proportion", "average_precision")
    return is_share or definition.name.endswith(("_rate", "_fraction"))


def format_value(metric: str, value: float) -> str:
    """Write a metric's value: rates in percent, others with four significant digits and their unit."""
    if is_rate(metric):
        digits = 1
        # all and none are claims about every case: 1999 of 2000 are not "100.0 %"
        while 0 < value < 1 and digits < _MAX_DIGITS and float(f"{100 * value:.{digits}f}") in (0, 100):
            digits += 1
        return f"{100 * value:.{digits}f} %"
    unit = definition_of(metric).unit
    return f"{value:#.4g}" + (f" {unit}" if unit else "")


def format_harm(metric: str, harm: float, *, signed: bool = False) -> str:
    """Write a harm with its unit: "1.25 points", "0.84 %" or "0.012 bit/byte"."""
    sign = "+" if signed else ""
    if is_rate(metric):
        return f"{_clean(100 * harm, 2):{sign}.2f} points"
    if definition_of(metric).harm == "relative":
        return f"{_clean(100 * harm, 2):{sign}.2f} %"
    return f"{_clean(harm, 4):{sign}.4f} {definition_of(metric).unit}".rstrip()


def format_tolerance(metric: str, tolerance: float) -> str:
    """Write a tolerance without trailing zeros: "2 points", "1.5 %"."""
    if is_rate(metric):
        return f"{100 * tolerance:.4g} points"
    if definition_of(metric).harm == "relative":
        return f"{100 * tolerance:.4g} %"
    return f"{tolerance:.4g} {definition_of(metric).unit}".rstrip()


def format_threshold(metric: str, threshold: float) -> str:
    """Write a tripwire's threshold without trailing zeros, on the scale of the metric's values."""
    return f"{100 * threshold:.4g} %" if is_rate(metric) else format_tolerance(metric, threshold)


def format_range(metric: str, low: float, high: float) -> str:
    """Write the two bounds of a harm with one unit: "0.31 to 2.20 points"."""
    unit = format_harm(metric, high)
    number = format_harm(metric, low).split(" ")[0]
    return f"{number} to {unit}"


def format_p(p: float | None) -> str:
    """Write a p-value with two significant digits, never as 0."""
    if p is None:
        return "–"
    if p < 1e-6:
        return "<1e-6"
    return f"{p:.2f}" if p >= 0.095 else f"{p:.2g}"


def format_count(count: int) -> str:
    """Write an estimated count with two significant digits: "about 1,200"."""
    if count < 100:
        return f"about {count}"
    scale = 10 ** (math.floor(math.log10(count)) - 1)
    return f"about {round(count / scale) * scale:,}"


def format_num(num: int, one: str, many: str) -> str:
    """Write a number with the words for one or for many: "1 layer", "2,000 layers"."""
    return f"{num:,} {one if num == 1 else many}"


def name_metric(metric: str, bucket: str | None) -> str:
    """Name a metric with its bucket: "workflows/task_completion_rate [steps/5-8]"."""
    return metric + (f" [{bucket}]" if bucket else "")


def name_comparison(comparison: Comparison) -> str:
    """Name what a comparison compares."""
    return name_metric(comparison.metric, comparison.bucket)


def cut_text(text: str, length: int) -> str:
    """Cut a text to a length, with a word on how much more there is."""
    return text if len(text) <= length else f"{text[:length]} … ({len(text) - length:,} more characters)"


def escape_markdown(text: str) -> str:
    """Make a text safe for one line of Markdown, be it in a list, a table's cell or an HTML tag's content.

    Entities rather than backslashes, which mean nothing between HTML tags. "<" stays before a digit, where it opens
    no tag, as in "p <1e-6".
    """
    line = _BACKSLASH.sub("&#92;", show_unprintable(text).translate(_IN_MARKDOWN))
    line = _LINKED.sub(r"\g<0>&#8203;", _EMPHASIS.sub("&#95;", line))
    return re.sub(r"<(?!\d)", "&lt;", line).replace("](", "]&#40;")


def natural_key(text: str) -> list[tuple[int, str]]:
    """Sort key that puts "steps_2" before "steps_10"."""
    return [_natural_part(part) for part in re.split(r"(\d+)", text) if part]


def _natural_part(part: str) -> tuple[int, str]:
    """Return a number's length and digits, as Python reads no number of 5,000 digits; "①" and "²" are no numbers."""
    digits = part.lstrip("0")
    return (len(digits), digits) if part.isdecimal() else (-1, part)


def _clean(value: float, digits: int) -> float:
    return round(value, digits) + 0.0  # adding zero turns -0.0 into 0.0
