"""Run all evals of one candidate on the path that would serve it: `python -m stages.evaluate CANDIDATE`.

With `--shard 2/8` it runs one of eight parts of the cases and stops; the stage without it takes all parts over
(`pipeline/running/shards.py`).
"""

from __future__ import annotations

from pathlib import Path

from pipeline.products import KINDS
from pipeline.products.params import find_owner, load_params
from pipeline.running.shards import parse_shard
from pipeline.settings.base import Product
from stages.cli import read_name, run_stage


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line, or a shard of its cases."""
    shard = parse_shard(argv[2]) if len(argv) == 3 and argv[1] == "--shard" else None
    name = read_name(argv[:1] if shard else argv, "candidate")
    product = find_owner(load_params(), name, kind=Product)
    kind = KINDS[product.kind]
    if shard is None:
        kind.evaluate(name, product, root=Path(), build=product.build)
        return 0
    with kind.open_replica(name, product, root=Path(), build=product.build) as run:
        num_entries = run(shard)
    print(f"{name}: shard {shard} is finished: {num_entries} entries are kept for the stage without --shard")
    return 0


if __name__ == "__main__":
    run_stage("evaluate", main)
