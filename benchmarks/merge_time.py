"""How long the merge of shards takes, and how much memory: `python -m benchmarks.merge_time [cases] [shards]`.

Writes synthetic records of one eval (1,000,000 in 64 shards) as attempts at shards do. A process of its own merges them
into a journal and finds every record, as the stage does before it writes them. Compare and gate of as many cases are
measured by `gate_time`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeline.records.evaluations import CaseRecord
from pipeline.records.fingerprints import fingerprint
from pipeline.running.journal import Journal
from pipeline.running.shards import AttemptFolder, Shard, find_shards

ROOT = Path(__file__).resolve().parent.parent
FACTS = {"checkpoint": {"digest": "a" * 64}, "serving": {"dtype": "float32"}}
NAME, EVAL, KEY = "candidate", "calls", "key"


def write_shards(build: Path, num_cases: int, num_shards: int) -> None:
    """Write one finished attempt at each shard."""
    template = CaseRecord(
        case_id="",
        input_digest="",
        cluster="",
        buckets=("family/status",),
        prompt="Put three of item 17 on the shelf and tell me how many are left there.",
        output='{"name": "move_item", "arguments": {"item": 17, "count": 3, "shelf": "B"}}',
        scores={"exact": 1.0, "accepted": 1.0},
        latency_s=0.1,
        num_completion_tokens=25,
        fingerprint=fingerprint(FACTS),
    )
    for number in range(1, num_shards + 1):
        shard = Shard(number, num_shards)
        attempt = AttemptFolder(build, NAME, shard)
        with attempt.open_journal(EVAL, FACTS, key=KEY) as journal:
            for i in range(number - 1, num_cases, num_shards):
                update = {"case_id": f"case-{i}", "input_digest": f"{i:064x}", "cluster": f"case-{i}"}
                journal.add(f"{i:064x}", template.model_copy(update=update))
        attempt.finish()


def merge(build: Path, num_cases: int) -> None:
    """Merge them, and find every case."""
    shards = find_shards(build, NAME)
    assert shards is not None
    with Journal(build / "whole.jsonl", fingerprint=fingerprint(FACTS), key=KEY) as journal:
        shards.merge(EVAL, FACTS, key=KEY, journal=journal)
        assert all(journal.find(f"{i:064x}") for i in range(num_cases))


def main() -> None:
    """Write, merge, print."""
    num_cases, num_shards, *folder = [*sys.argv[1:], *("1000000", "64")[len(sys.argv) - 1 :]]
    if folder:
        merge(Path(folder[0]), int(num_cases))
        return
    with tempfile.TemporaryDirectory() as temporary:
        write_shards(Path(temporary), int(num_cases), int(num_shards))
        size = sum(path.stat().st_size for path in Path(temporary).rglob("*.jsonl")) >> 20
        command = [sys.executable, "-m", "benchmarks.merge_time", num_cases, num_shards, temporary]
        started = time.perf_counter()
        _, status, usage = os.wait4(subprocess.Popen(command, cwd=ROOT).pid, 0)
        print(
            f"{int(num_cases):,} records in {num_shards} shards, {size} MiB: exit {os.waitstatus_to_exitcode(status)}, "
            f"wall {time.perf_counter() - started:.1f} s, CPU {usage.ru_utime + usage.ru_stime:.1f} s, "
            f"peak {usage.ru_maxrss / 1024:,.0f} MiB"
        )


if __name__ == "__main__":
    main()
