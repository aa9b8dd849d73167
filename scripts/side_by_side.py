"""Make and evaluate several candidates at once: `python -m scripts.side_by_side NUMBER [PRODUCT ...]`.

DVC runs the stages of one call one after another. Here each candidate has a `dvc repro` of its own, as many at once as
asked, and each line that it prints begins with its candidate's name. What they made is recorded in dvc.lock, so a
`dvc repro` afterwards finds it done and goes on with the verdict. `make repro JOBS=NUMBER` does both.

Memory and processor are shared: each candidate starts as many servers or workers as its product's settings say. Where a
candidate fails the others go on; then the names of those that failed are one line, and it ends with 1.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.errors import QuantgateError, SettingsError  # noqa: E402
from pipeline.products.params import get_product, load_params  # noqa: E402
from pipeline.settings.base import Product  # noqa: E402
from stages.cli import run_stage  # noqa: E402

# other calls hold DVC's lock while they digest what they made, which takes longer than DVC waits by itself
DVC = (sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item")


def main(argv: list[str]) -> int:
    """Return 0 when each candidate of the products (all of them by default) is made and evaluated."""
    number, *names = argv or [""]
    if not number.isdecimal() or not int(number):
        raise SettingsError(f"JOBS: expected how many candidates to make at once, such as 4, got {number!r}")
    params = load_params()
    products = [get_product(params, name, kind=Product) for name in names] or params.products.values()
    candidates = [candidate for product in products for candidate in product.candidates]
    if not reproduce("env"):  # which the others depend on
        return 1
    with ThreadPoolExecutor(int(number)) as pool:
        is_done = pool.map(make_candidate, candidates)
    if failed := [name for name, done in zip(candidates, is_done, strict=True) if not done]:
        raise QuantgateError(f"{', '.join(failed)}: failed, as said above; what finished is kept")
    return 0


def make_candidate(name: str) -> bool:
    """Make and evaluate one candidate; return whether both worked."""
    return reproduce(f"optimize@{name}", f"evaluate@{name}", prefix=f"{name}: ")


def reproduce(*stages: str, prefix: str = "") -> bool:
    """Run stages by DVC, put a prefix before each line that it prints, and return whether they worked."""
    with subprocess.Popen([*DVC, *stages], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{prefix}{line}", end="", flush=True)
    return process.returncode == 0


if __name__ == "__main__":
    run_stage("side by side", main)
