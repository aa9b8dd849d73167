"""Stage compare_images: judge every candidate of the image track, as `compare` does the text track's."""

from __future__ import annotations

from pipeline.params import get_images, load_params
from stages.cli import run_stage
from stages.compare import compare


def main(argv: list[str]) -> int:
    """Judge the image track."""
    return compare(get_images(load_params()), "images")


if __name__ == "__main__":
    run_stage("compare_images", main, is_short=True)
