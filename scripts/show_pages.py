"""Print where MLflow shows the products of params.yaml, below the address of its server.

python -m scripts.show_pages http://127.0.0.1:5000
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.products.params import load_params
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Print what stage `track` left of each."""
    if len(argv) != 1:
        raise SettingsError(f"expected one address, such as http://127.0.0.1:5000, got {' '.join(argv)!r}")
    paths = [Path(f"mlartifacts/pages-{name}.txt") for name in load_params().products]
    pages = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    print("".join(pages).replace("#", f"{argv[0]}/#") or "no product was judged here yet\n", end="")
    return 0


if __name__ == "__main__":
    run_stage("ui", main, is_short=True)
