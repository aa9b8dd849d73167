"""The calibration texts that ship with the project."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.running.made_files import make_missing

TEXTS = Path("evalsets/calibration")


def load_calibration_texts() -> Evalset:
    """Read the texts; a fresh clone makes their file first, as git does not hold it."""
    make_missing(Path(), note=partial(print, file=sys.stderr), named_in=[str(TEXTS)])
    return load_evalset(TEXTS)
