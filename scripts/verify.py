"""Check a release bundle offline, without its weights: is it whole, and does its verdict follow from its scores?

    python -m scripts.verify release/agent
    python -m scripts.verify release/agent --public-key release.pub      it must be signed by that key
    python -m scripts.verify release/agent --weights build/agent/candidates/awq-long-g32/checkpoint

Prints a line for each thing that differs, and ends with 1 when there is any.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.errors import QuantgateError  # noqa: E402
from pipeline.gate.loosening import MANIFEST  # noqa: E402
from pipeline.gate.wording import format_num, show_unprintable  # noqa: E402
from pipeline.records.record_files import read_record  # noqa: E402
from pipeline.release.manifest import Manifest  # noqa: E402
from pipeline.release.verification import verify_bundle  # noqa: E402


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.verify", description="Check a release bundle offline.")
    parser.add_argument("bundle", type=Path, help="folder of the bundle, for example release/agent")
    parser.add_argument("--public-key", type=Path, help="PEM public key of who must have signed it")
    parser.add_argument(
        "--weights",
        action="append",
        default=[],
        metavar="[NAME=]FOLDER",
        help="weights to compare with what was released; NAME if several were",
    )
    return parser.parse_args(argv)


def name_weights(bundle: Path, given: list[str]) -> dict[str, Path]:
    """Return the folders of weights by candidate; a folder without a name is the only candidate's."""
    folders = {}
    for word in given:
        name, is_named, folder = word.rpartition("=")
        if not is_named:
            released = read_record(bundle / MANIFEST, Manifest).release
            if len(released) != 1:
                names = ", ".join(side.candidate for side in released)
                sys.exit(f"verify: --weights: expected NAME=FOLDER, as {names} were released, got {word!r}")
            name = released[0].candidate
        folders[name] = Path(folder)
    return folders


def main(argv: list[str]) -> int:
    """Print what was found; return 1 when anything differs."""
    given = parse_arguments(argv)
    if not given.bundle.is_dir():
        sys.exit(f"verify: {given.bundle}: expected the folder of a release bundle, found none")
    try:
        found = verify_bundle(
            given.bundle, public_key=given.public_key, weights=name_weights(given.bundle, given.weights)
        )
    except QuantgateError as error:
        sys.exit(f"verify: {error}")
    for line in found.notes + [f"DIFFERS  {problem}" for problem in found.problems]:
        print(show_unprintable(line))
    said = format_num(len(found.problems), "problem", "problems") if found.problems else "verified"
    print(f"{given.bundle}: {said}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
