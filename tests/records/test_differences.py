"""What kind of difference two answers have: what a user loses by it hangs on that."""

from __future__ import annotations

import pytest

from pipeline.records.differences import KINDS, classify_difference

CALL = '{"name": "order", "arguments": {"item": "lamp", "n": 2}}'


@pytest.mark.parametrize(
    ("reference", "candidate", "kind"),
    [
        (CALL, CALL, None),
        (CALL, CALL.replace('": 2', '":  2'), "whitespace"),
        (CALL, '{"arguments": {"n": 2, "item": "lamp"}, "name": "order"}', "spelling of the same call"),
        (CALL, CALL.replace("lamp", "lamb"), "argument value"),
        (CALL.replace("2", "1"), CALL.replace("2", "true"), "argument value"),
        (CALL, CALL.replace('"n"', '"m"'), "argument name"),
        (CALL, CALL.replace("order", "move"), "tool name"),
        (CALL, CALL[:-1], "JSON shape"),
        (CALL, "I can't do that.", "JSON shape"),
        ("I can't.", "I can not.", "prose"),
        ("a\n" + CALL, "a", "number of turns"),
        (CALL + "\nx", CALL.replace("lamp", "lamb") + "\n" + CALL, "argument value"),
    ],
)
def test_the_first_turn_that_differs_gives_the_kind(reference: str, candidate: str, kind: str | None) -> None:
    assert classify_difference(reference, candidate) == kind
    assert kind is None or kind in KINDS
