"""An interval of a median holds its median: what was edited, or went wrong in arithmetic, is no evidence."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.records.medians import MedianInterval


@pytest.mark.parametrize(("low", "median", "high"), [(1.1, 1.0, 1.2), (0.8, 1.0, 0.9)])
def test_an_interval_without_its_median_is_refused(low: float, median: float, high: float) -> None:
    """A gate reads only `high` of a limit and `low` of a loss: ends that are swapped would pass both."""
    with pytest.raises(ValidationError, match="low <= median <= high"):
        MedianInterval(low=low, median=median, high=high)
