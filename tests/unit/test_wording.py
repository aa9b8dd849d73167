"""Numbers as people read them: rounding must not claim what is not so."""

from __future__ import annotations

import pytest

from pipeline.gate.wording import format_value


@pytest.mark.parametrize(("right", "n", "said"), [
    (2000, 2000, "100.0 %"), (1999, 2000, "99.95 %"), (29_999, 30_000, "99.997 %"), (1998, 2000, "99.9 %"),
    (0, 2000, "0.0 %"), (1, 2500, "0.04 %"), (1, 2000, "0.1 %"), (833, 1000, "83.3 %"),
])
def test_all_and_none_are_said_only_of_all_and_none(right: int, n: int, said: str) -> None:
    assert format_value("workflows/task_completion_rate", right / n) == said
