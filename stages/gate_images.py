"""Stage gate_images: let the image track's release through or stop it, as `gate` does the text track's."""

from __future__ import annotations

from pipeline.params import get_images, load_params
from stages.cli import run_stage
from stages.gate import gate


def main(argv: list[str]) -> int:
    """Gate the image track."""
    return gate(get_images(load_params()), "images")


if __name__ == "__main__":
    run_stage("gate_images", main)
