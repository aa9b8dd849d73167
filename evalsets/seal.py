"""Seal an evalset: count its cases and write the counts and their digest into its card.

    python -m evalsets.seal evalsets/mine

A card without a seal, or with one that no longer fits `cases.jsonl`, loads nowhere. Run this when the
cases were meant to change. All other keys of the card stay, with their order and comments; indentation
becomes ruamel.yaml's. Where cases name pictures, it writes the digest of each into its case, too.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

import pipeline.products  # noqa: F401 - a kind of product may have cases of its own
from pipeline.errors import EvalsetError
from pipeline.evalsets.cards import (
    CARD_FILE,
    Card,
    CardText,
    Seal,
    check_categories,
    compute_seal,
    load_cases,
    parse_card,
    read_card,
)
from pipeline.evalsets.cases import CASES_FILE, PICTURE_DIGESTS, AnswerCase, DetectionCase
from pipeline.evalsets.pictures import check_pictures, measure_picture
from pipeline.records.digests import digest_file
from pipeline.records.files import read_lines, write_text
from stages.cli import run_stage

_LINE_WIDTH = 120
_PICTURE_KINDS = ("detection", "upscaling")


def seal(folder: Path) -> Card:
    """Write what `cases.jsonl` holds into the card of its folder, and return the card.

    Raises:
        EvalsetError: a card, case or picture that is malformed, with file and line; the card stays as it was.
    """
    text = read_card(folder)
    written = parse_card(text, folder, CardText)
    if written.kind in _PICTURE_KINDS:
        _write_digests(folder)
    cases = load_cases(folder, written)
    check_categories(folder, written, cases)
    check_pictures(folder, cases)
    card = _make_yaml().load(text)
    _set_seal(card, compute_seal(folder / CASES_FILE, cases))
    sealed = render_card(card)
    checked = parse_card(sealed, folder, Card)
    write_text(folder / CARD_FILE, sealed)
    return checked


def render_card(card: dict[str, Any]) -> str:
    """Return a card as YAML."""
    buffer = io.StringIO()
    _make_yaml().dump(card, buffer)
    return buffer.getvalue()


def describe(card: Card) -> str:
    """Say in one line what was sealed."""
    buckets = ", ".join(f"{name} {num:,}" for name, num in card.buckets.items())
    return (
        f"{card.name}: {card.num_cases:,} cases, {card.num_clusters:,} clusters, "
        f"{f'buckets {buckets}' if buckets else 'no buckets'}; card sealed"
    )


def warn_of_answers(path: Path, cases: Sequence[AnswerCase]) -> Iterator[str]:
    """Yield what keeps answers in words from ever being right; such a case shows no loss.

    Args:
        path: of the cases.
        cases: all of them, a line each.
    """
    if blank := [line for line, case in enumerate(cases, start=1) if case.answer != case.answer.strip()]:
        yield (
            f"{path}:{blank[0]}: answer begins or ends with blanks; no answer equals it once a task has stripped that"
            f"{_count_more(blank)}"
        )
    first: dict[str, str] = {}
    if differing := [
        line for line, case in enumerate(cases, start=1) if first.setdefault(case.question, case.answer) != case.answer
    ]:
        yield (
            f"{path}:{differing[0]}: a question that stands above with another answer; one of both is always wrong"
            f"{_count_more(differing)}"
        )


def warn_of_boxes(folder: Path, cases: Sequence[DetectionCase]) -> Iterator[str]:
    """Yield that boxes reach out of their pictures, as they do where their last two numbers are right and bottom.

    Args:
        folder: of the evalset.
        cases: all of them, a line each.
    """
    out = []
    for line, case in enumerate(cases, start=1):
        size = measure_picture(folder / case.image)
        out += [(line, a.bbox, size) for a in case.annotations if _reaches_out(a.bbox, size)]
    if out:
        line, bbox, size = out[0]
        num = sum(len(case.annotations) for case in cases)
        yield (
            f"{folder / CASES_FILE}:{line}: bbox {list(bbox)} reaches out of its picture of {size[0]} x {size[1]} "
            f"pixels, as do {len(out):,} of {num:,} in all; expected left, top, width and height: where the last two "
            "are right and bottom, convert them, or cut what is outside"
        )


def _reaches_out(bbox: Sequence[float], size: Sequence[int]) -> bool:
    """Say whether a box leaves a picture by more than a rounded pixel."""
    return any(low < -1 or low + extent > side + 1 for low, extent, side in zip(bbox[:2], bbox[2:], size, strict=True))


def seal_and_warn(folder: Path) -> str:
    """Seal a folder, say on stderr what may be wrong though it is well formed, and return what it holds.

    Raises:
        EvalsetError, OSError: as `seal` does.
    """
    card = seal(folder)
    for warning in _list_warnings(folder, card):
        print(f"warning: {warning}", file=sys.stderr)
    return describe(card)


def _list_warnings(folder: Path, card: Card) -> list[str]:
    if card.kind == AnswerCase.card_kind:
        return list(warn_of_answers(folder / CASES_FILE, load_cases(folder, card)))
    return list(warn_of_boxes(folder, load_cases(folder, card))) if card.kind == DetectionCase.card_kind else []


def _count_more(lines: Sequence[int]) -> str:
    return f" (likewise {len(lines) - 1:,} more)" if len(lines) > 1 else ""


def _write_digests(folder: Path) -> None:
    """Bring the digests in `cases.jsonl` up to date; what else is wrong with the file is said by those who load it."""
    path = folder / CASES_FILE
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError):
        return
    updated = [_update_digests(folder, f"{path}:{number}", line) for number, line in enumerate(lines, start=1)]
    if updated != lines:
        write_text(path, "".join(f"{line}\n" for line in updated))


def _update_digests(folder: Path, where: str, line: str) -> str:
    try:
        case = json.loads(line)
    except ValueError:
        return line
    if not isinstance(case, dict):
        return line
    found = {}
    for name, digest in PICTURE_DIGESTS.items():
        if isinstance(case.get(name), str):
            if not (folder / case[name]).is_file():
                raise EvalsetError(f"{where}: {name}: expected a picture in {folder}, found no file {case[name]!r}")
            found[digest] = digest_file(folder / case[name])
    # a line of escapes stays one: half of a surrogate pair is an escape, and UTF-8 can't hold it otherwise
    return line if case | found == case else json.dumps(case | found, ensure_ascii="\\u" in line)


def _make_yaml() -> YAML:
    yaml = YAML()
    yaml.width = _LINE_WIDTH
    yaml.preserve_quotes = True
    return yaml


def _set_seal(card: CommentedMap, found: Seal) -> None:
    """Set the keys of a seal; those that a card does not have yet go to its end."""
    holder, key = _find_comment(card)
    comment = holder.ca.items.pop(key, None)
    old = card.get("buckets")
    card.update(found.model_dump() | {"buckets": CommentedMap(found.buckets)})
    if isinstance(old, CommentedMap):
        card["buckets"].ca.items.update({k: c for k, c in old.ca.items.items() if k in found.buckets})
    if comment is not None:
        holder, key = _find_comment(card)
        holder.ca.items[key] = comment


def _find_comment(card: CommentedMap) -> tuple[CommentedMap, str]:
    """Return where ruamel.yaml hangs the comment between the buckets and the next key: on the last bucket."""
    buckets = card.get("buckets")
    if isinstance(buckets, CommentedMap) and buckets and not buckets.fa.flow_style():
        return buckets, list(buckets)[-1]
    return card, "buckets"


def main(argv: list[str]) -> int:
    """Seal the folder named on the command line and say what it holds."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise EvalsetError(f"expected one evalset folder, got {argv!r}; usage: python -m evalsets.seal FOLDER")
    folder = Path(argv[0])
    try:
        print(seal_and_warn(folder))
    except OSError as error:
        raise EvalsetError(str(error)) from None
    return 0


if __name__ == "__main__":
    run_stage("seal", main)
