"""The report as one HTML page: verdicts, every comparison as an interval, the cases behind them, the plots.

The page holds everything it shows and asks for nothing: no network, no script, pictures as data. Its policy (a
Content-Security-Policy in its head) keeps that true even if an escape were forgotten. The template escapes every text,
and characters that don't print are written out.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from pipeline.gate.verdicts import Judgement, Policy, blocking_verdicts, is_blocking, is_stopping, order_for_readers
from pipeline.gate.wording import (
    cut_text,
    format_harm,
    format_p,
    format_range,
    format_tolerance,
    format_value,
    name_comparison,
    show_unprintable,
)
from pipeline.records.reasons import ReasonKind
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.report.certificate_section import describe_certificate
from pipeline.report.explanation_records import Explanation, describe_place
from pipeline.report.sections import Figure
from pipeline.report.unproven import list_unproven

_TEMPLATE = Path(__file__).with_name("page.jinja")
_LEFT, _RIGHT = -2.0, 4.0  # drawn of an interval, in units of the tolerance
_WIDTH, _MARGIN = 240.0, 8.0  # of its picture, in its own units
_LARGE_PICTURE = 700_000  # bytes of a PNG that is worth compressing with loss
_MAX_PICTURES = 2_100_000  # bytes, all of them: with a third more as text the page stays below 3 MB
_JPEG_QUALITY = 85
_MAX_REASON = 2_000  # characters
_ORDER = ("fail", "refused", "inconclusive", "pass", "reported")
_MARKS = {"pass": "✓", "fail": "✗", "inconclusive": "?", "refused": "⊘", "no gain": "–", "reported": "·"}


@dataclass(frozen=True)
class Bar:
    """An interval of harm, in the units of its picture; ends beyond what is drawn are cut there."""

    low: float
    high: float
    harm: float
    is_cut_left: bool
    is_cut_right: bool
    words: str


@dataclass(frozen=True)
class EmbeddedPicture:
    """A picture as data, or the name of one that had no room (`data` is empty)."""

    name: str
    caption: str
    data: str


def render_html(
    judgement: Judgement,
    explanation: Explanation,
    pictures: Mapping[Figure, bytes],
    built: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Write the page.

    Args:
        judgement: what was decided.
        explanation: the cases behind it.
        pictures: PNG files, the most telling first.
        built: what was done to each candidate, where that is known.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_show, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"place": describe_place, "bar": draw_bar, "name": name_comparison, "p": format_p}
    environment.globals |= {
        "zero": _place(0.0),
        "one": _place(1.0),
        "right": _WIDTH - _MARGIN,
        "width": _WIDTH,
        "marks": _MARKS,
        "confidence": f"{1 - judgement.policy.alpha:.0%}",
    }
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    blocking = blocking_verdicts(judgement)
    return template.render(
        judgement=judgement,
        policy=judgement.policy,
        blocking=[verdict.candidate for verdict in blocking],
        causes=[
            cut_text(f"{verdict.candidate}: {_find_cause(verdict, judgement.policy)}", _MAX_REASON)
            for verdict in blocking
        ],
        unproven=list_unproven(judgement),
        candidates=[
            _describe(judgement, verdict.candidate, explanation) | {"built": built.get(verdict.candidate, "")}
            for verdict in order_for_readers(judgement)
        ],
        pictures=embed_pictures(pictures),
    )


def _show(value: Any) -> Any:
    """Write out what does not print in every text that the template prints, but for what is markup already."""
    return show_unprintable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _describe(judgement: Judgement, candidate: str, explanation: Explanation) -> dict[str, Any]:
    verdict = next(v for v in judgement.verdicts if v.candidate == candidate)
    gated = sorted((c for c in verdict.comparisons if c.tolerance is not None), key=lambda c: _ORDER.index(c.outcome))
    in_rows = {f"{name_comparison(c)}: {c.sentence}" for c in gated}  # each stands in its own row
    counts = {outcome: sum(c.outcome == outcome for c in gated) for outcome in ("pass", "fail", "inconclusive")}
    return {
        "verdict": verdict,
        "blocks": verdict.is_release and is_blocking(verdict, judgement.policy),
        "counts": ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing compared",
        "reasons": [cut_text(str(reason), _MAX_REASON) for reason in verdict.reasons if reason.text not in in_rows],
        "certificate": describe_certificate(verdict, judgement.policy),
        "gated": [_row(c) for c in gated],
        "reported": [_row(c) for c in verdict.comparisons if c.tolerance is None],
        "explained": explanation.of(candidate),
    }


def _find_cause(verdict: Verdict, policy: Policy) -> str:
    """Return what a reader needs first of a verdict that blocks: the worst of what stops it, and why."""
    said = {reason.kind: str(reason) for reason in reversed(verdict.reasons)}
    stops = {
        c.outcome: f"{c.outcome}: {name_comparison(c)}: {c.sentence}"
        for c in reversed(verdict.comparisons)
        if is_stopping(c, policy)
    }
    lost = said.get(ReasonKind.HEADLINE, stops["fail"]) if "fail" in stops else None
    is_strict = policy.on_inconclusive == "block"
    causes = (
        said.get(ReasonKind.REFUSED),
        said.get(ReasonKind.FAILED),
        lost,
        said.get(ReasonKind.UNPROVEN) if is_strict else None,
        said.get(ReasonKind.NO_GAIN),
        next(iter(stops.values()), None),
    )
    return next((cause for cause in causes if cause), verdict.outcome)


def _row(c: Comparison) -> dict[str, Any]:
    return {
        "comparison": c,
        "reference": format_value(c.metric, c.reference),
        "candidate": format_value(c.metric, c.candidate),
        "harm": format_harm(c.metric, c.harm, signed=True),
        "range": format_range(c.metric, c.low, c.high),
        "tolerance": "" if c.tolerance is None else format_tolerance(c.metric, c.tolerance),
        "n": f"{c.n:,}" + (f" ({c.num_clusters:,} clusters)" if c.num_clusters != c.n else ""),
    }


def draw_bar(c: Comparison) -> Bar:
    """Return the picture of a gated comparison, in units of its tolerance."""
    scale = c.tolerance or 1.0
    low, harm, high = c.low / scale, c.harm / scale, c.high / scale
    return Bar(
        _place(low),
        _place(high),
        _place(harm),
        is_cut_left=harm < _LEFT,
        is_cut_right=harm > _RIGHT,
        words=f"lost {format_harm(c.metric, c.harm)}, bounds {format_range(c.metric, c.low, c.high)}, tolerated "
        f"{format_tolerance(c.metric, scale)}",
    )


def _place(harm: float) -> float:
    inside = min(max(harm, _LEFT), _RIGHT)
    return round(_MARGIN + (inside - _LEFT) / (_RIGHT - _LEFT) * (_WIDTH - 2 * _MARGIN), 1)


def embed_pictures(pictures: Mapping[Figure, bytes]) -> list[EmbeddedPicture]:
    """Return pictures as data; what would make the page too large is only named."""
    embedded, room = [], _MAX_PICTURES
    for figure, png in pictures.items():
        content, kind = _compress(png)
        data = f"data:image/{kind};base64,{base64.b64encode(content).decode()}" if len(content) <= room else ""
        room -= len(content) if data else 0
        embedded.append(EmbeddedPicture(figure.name, figure.caption, data))
    return embedded


def _compress(png: bytes) -> tuple[bytes, str]:
    if len(png) <= _LARGE_PICTURE:
        return png, "png"
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture, io.BytesIO() as file:
        picture.convert("RGB").save(file, "JPEG", quality=_JPEG_QUALITY)
        return file.getvalue(), "jpeg"
