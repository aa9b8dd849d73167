"""Print the addresses of MLflow's pages on each product, as stage `track` left them: for `make ui`.

    python -m scripts.show_pages http://127.0.0.1:5000

Those of a product that is gone from params.yaml are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.products.params import load_params  # noqa: E402
from stages.cli import run_stage  # noqa: E402


def main(argv: list[str]) -> int:
    """Print them below the address of the server."""
    for name in load_params().products:
        path = Path("mlartifacts") / f"pages-{name}.txt"
        if path.is_file():
            print(path.read_text(encoding="utf-8").replace("#", f"{argv[0]}/#"), end="")
    return 0


if __name__ == "__main__":
    run_stage("ui", main, is_short=True)
