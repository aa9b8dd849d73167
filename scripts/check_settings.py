"""Read params.yaml before DVC does, which would tell a mistake there in its own words, and make what git does not hold.

python -m scripts.check_settings
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.products.params import list_texts, load_params  # noqa: E402
from pipeline.running.made_files import make_missing  # noqa: E402
from stages.cli import run_stage  # noqa: E402


def main(argv: list[str]) -> int:
    """Return 0 where the settings can be used and all files are there; a mistake is one line."""
    texts = list_texts(load_params())
    make_missing(ROOT, note=lambda line: print(f"quantgate settings: {line}", file=sys.stderr), named_in=texts)
    return 0


if __name__ == "__main__":
    run_stage("settings", main, is_short=True)
