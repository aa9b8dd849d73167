"""Print where MLflow shows the products of params.yaml, below the address of its server."""

from __future__ import annotations

from pathlib import Path

from pipeline.products.params import load_params
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Print what stage `track` left of each."""
    paths = [Path(f"mlartifacts/pages-{name}.txt") for name in load_params().products]
    pages = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    print("".join(pages).replace("#", f"{argv[0]}/#") or "no product was judged here yet\n", end="")
    return 0


if __name__ == "__main__":
    run_stage("ui", main, is_short=True)
