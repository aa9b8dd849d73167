"""Run all evals of one candidate on the path that would serve it: `python -m stages.evaluate CANDIDATE`.

With `--shard 2/8` it runs one of eight parts of the cases and stops; the stage without it takes all parts over
(`pipeline/running/shards.py`). With `execution.kind: ray` a cluster does all of it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.products import KINDS
from pipeline.products.params import find_owner, list_project_files, load_params
from pipeline.running.prefetched import take_over
from pipeline.running.result_folders import check_evaluation_folders, check_folder
from pipeline.running.shards import AttemptFolder, Shard, parse_shard
from pipeline.settings.base import Product
from pipeline.settings.execution import RayExecution
from stages.cli import load_cluster, read_name, run_stage


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line, or a shard of its cases."""
    shard = parse_shard(argv[2]) if len(argv) == 3 and argv[1] == "--shard" else None
    name = read_name(argv[:1] if shard else argv, "candidate")
    params = load_params()
    product = find_owner(params, name, kind=Product)
    if shard is not None:
        evaluate_shard(name, product, shard)
        return 0
    check_evaluation_folders(product.build, name)
    if take_over("evaluate", name, product):
        pass
    elif isinstance(params.execution, RayExecution):
        needed = partial(list_project_files, params, product, name)
        load_cluster().evaluate_on_ray(params.execution, name, product, needed)
    else:
        KINDS[product.kind].evaluate(name, product, root=Path(), build=product.build)
    return 0


def evaluate_shard(name: str, product: Product, shard: Shard) -> None:
    """Evaluate a part of the cases, for the stage to take over."""
    check_folder(AttemptFolder(product.build, name, shard).path)
    with KINDS[product.kind].open_replica(name, product, root=Path(), build=product.build) as replica:
        num_entries = replica.run(shard)
    print(f"{name}: shard {shard} is finished: {num_entries} entries are kept for the stage without --shard")


if __name__ == "__main__":
    run_stage("evaluate", main)
