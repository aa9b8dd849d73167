"""Stage track_images: log the judged candidates of the image track to MLflow, as `track` does the text track's."""

from __future__ import annotations

from stages.cli import run_stage
from stages.track import track


def main(argv: list[str]) -> int:
    """Log the image track."""
    return track("images")


if __name__ == "__main__":
    run_stage("track_images", main, is_short=True)
