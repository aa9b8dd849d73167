"""Faults of a Ray cluster while it evaluates a candidate: what is lost, asked twice, or let through.

    python -m benchmarks.ray_faults [--candidate shots] [--nodes 3] [--only NAME ...]

Needs [Ray](../docs/scale.md#ray), and a project in which the candidate is built (`python -m stages.optimize`). Each
fault happens in a copy of it, on a cluster of one machine with nodes of one core each. Records are compared with those
of a run in one process, without latencies. Prints a row of Markdown each. `apart` and `disk` mount folders, which takes
the rights of root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.check_resume import list_children
from pipeline.products.params import find_owner, load_params
from pipeline.settings.base import Product

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
MEMORY = {"object_store_memory": 100 << 20}  # of a node
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "mlartifacts", "mlflow.db", "reports", "release", "shards", "journal"
)


@dataclass
class Trial:
    """A copy of the project, and a cluster that evaluates a candidate in it."""

    folder: Path
    product: str
    candidate: str
    num_nodes: int
    cluster: Any = None
    nodes: list[Any] = field(default_factory=list)
    driver: subprocess.Popen[str] | None = None
    said: list[str] = field(default_factory=list)

    @property
    def shards(self) -> Path:
        """Where the driver keeps shards."""
        return self.folder / "build" / self.product / "shards" / self.candidate

    @contextlib.contextmanager
    def start_cluster(self, **node: Any) -> Iterator[None]:
        """Start the head without a core, and the nodes; `node` is given to the last of them."""
        with self._start_head(num_cpus=0):
            for number in range(1, self.num_nodes + 1):
                options = node if number == self.num_nodes else {}
                self.nodes.append(self.cluster.add_node(num_cpus=1, **MEMORY, **options))
            yield

    def start_node(self) -> contextlib.AbstractContextManager[None]:
        """Start a cluster of one node that has all cores, as `ray start --head` makes it."""
        return self._start_head(num_cpus=self.num_nodes)

    @contextlib.contextmanager
    def _start_head(self, num_cpus: int) -> Iterator[None]:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus, **MEMORY})
        self.set_execution(f"{{kind: ray, address: '{self.cluster.address}', num_workers: {self.num_nodes}}}")
        try:
            yield
        finally:
            self.end_driver()
            self.cluster.shutdown()
            self.nodes.clear()

    def set_execution(self, execution: str) -> None:
        """Say in the copy's params.yaml where work is done."""
        path = self.folder / "params.yaml"
        settings = re.sub(r"(?m)^execution:.*\n", "", path.read_text(encoding="utf-8"))
        path.write_text(f"execution: {execution}\n{settings}", encoding="utf-8")

    def start(self) -> None:
        """Start the stage."""
        command = [sys.executable, "-m", "stages.evaluate", self.candidate]
        environment = os.environ | import_first(self.folder)
        self.driver = subprocess.Popen(command, cwd=self.folder, env=environment, stderr=subprocess.PIPE, text=True)

    def wait_for_entries(self) -> None:
        """Wait until some shard with cases is finished, which leaves others."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            assert self.driver is not None
            if self.driver.poll() is not None:
                raise SystemExit(f"the stage ended too early: {self.finish()}")
            if self.list_finished():
                return
            time.sleep(0.2)
        raise SystemExit("no shard was finished in time")

    def finish(self) -> int:
        """Wait for the stage's end; return its exit code."""
        assert self.driver is not None
        _, stderr = self.driver.communicate(timeout=LIMIT_S)
        self.said += [line for line in stderr.splitlines() if "utils.py" not in line]
        return self.driver.returncode

    def end_driver(self) -> None:
        """Kill the stage where it still runs."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()

    def list_finished(self) -> list[Path]:
        """Return the folders of finished attempts that hold an answer."""
        found = []
        for path in sorted(self.shards.glob("*/*/attempt.json")):
            entries = [file.read_bytes() for file in path.parent.glob("*.jsonl")]
            with contextlib.suppress(json.JSONDecodeError):  # it is being written
                is_finished = json.loads(path.read_text(encoding="utf-8"))["is_finished"]
                if is_finished and any(b'"record":{' in data for data in entries):
                    found.append(path.parent)
        return found


def import_first(folder: Path) -> dict[str, str]:
    """Return the environment variable by which Python looks into a folder before those it looks into now."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def list_replicas() -> list[int]:
    """Return the processes of replicas."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::Replica"):
                found.append(int(path.parent.name))
    return found


def count_pages(pid: int) -> int:
    """Return the pages that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def run_nothing(trial: Trial) -> int:
    """Let it run without a fault."""
    with trial.start_cluster():
        trial.start()
        return trial.finish()


def kill_worker(trial: Trial) -> int:
    """Kill the process of a replica."""
    with trial.start_cluster():
        trial.start()
        trial.wait_for_entries()
        os.kill(list_replicas()[0], signal.SIGKILL)
        return trial.finish()


def kill_child(trial: Trial) -> int:
    """Kill the largest process that works for a replica."""
    with trial.start_cluster():
        trial.start()
        trial.wait_for_entries()
        os.kill(max(list_children(list_replicas()[0]), key=count_pages), signal.SIGKILL)
        return trial.finish()


def remove_node(trial: Trial) -> int:
    """Take a node out of the cluster."""
    with trial.start_cluster():
        trial.start()
        trial.wait_for_entries()
        trial.cluster.remove_node(trial.nodes[-1], allow_graceful=False)
        return trial.finish()


def kill_driver(trial: Trial) -> int:
    """Kill the stage, and start it again."""
    with trial.start_cluster():
        trial.start()
        trial.wait_for_entries()
        trial.end_driver()
        time.sleep(3)
        trial.start()
        return trial.finish()


def _edit_shards(trial: Trial, edit: Callable[[Path], None]) -> int:
    """Kill the stage, edit a finished shard, and start the stage again."""
    with trial.start_cluster():
        trial.start()
        trial.wait_for_entries()
        trial.end_driver()
        edit(trial.list_finished()[0])
        time.sleep(3)
        trial.start()
        return trial.finish()


def lose_file(trial: Trial) -> int:
    """Lose the file of a finished shard."""
    return _edit_shards(trial, lambda attempt: next(attempt.glob("*.jsonl")).unlink())


def change_answer(trial: Trial) -> int:
    """Double a finished shard, with one score changed."""

    def double(attempt: Path) -> None:
        other = Path(shutil.copytree(attempt, attempt.with_name("29991231T000000-double")))
        path = next(other.glob("*.jsonl"))
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'("scores":\{"\w+":)[\d.]+', r"\g<1>0.125", text, count=1), encoding="utf-8")
        index = other / "attempt.json"
        text = re.sub(r'"sha256": "\w+"', '"sha256": null', index.read_text(encoding="utf-8"))
        index.write_text(text, encoding="utf-8")

    return _edit_shards(trial, double)


def use_other_device(trial: Trial) -> int:
    """Let a shard come from another kind of device."""

    def rename(attempt: Path) -> None:
        index = attempt / "attempt.json"
        data = json.loads(index.read_text(encoding="utf-8"))
        data["facts"]["hardware"]["device"], data["fingerprint"] = "NVIDIA H100 80GB HBM3", "0" * 64
        index.write_text(json.dumps(data), encoding="utf-8")

    return _edit_shards(trial, rename)


def slow_node(trial: Trial) -> int:
    """Let one replica run a fifth of the time."""
    with trial.start_cluster():
        trial.start()
        trial.wait_for_entries()
        slowed = list_replicas()[0]
        assert trial.driver is not None
        while trial.driver.poll() is None:
            for wait_s, number in ((0.8, signal.SIGSTOP), (0.2, signal.SIGCONT)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slowed, number)
                time.sleep(wait_s)
        return trial.finish()


def cut_node(trial: Trial) -> int:
    """Let a node answer no more, as one whose network is cut: its raylet and its replica stand still."""
    with trial.start_cluster():
        trial.start()
        trial.wait_for_entries()
        raylet = trial.nodes[-1].all_processes["raylet"][0].process.pid
        tree = [raylet, *map(int, subprocess.run(["pgrep", "-P", str(raylet)], capture_output=True).stdout.split())]
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        try:
            return trial.finish()
        finally:
            for pid in tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def fill_disk(trial: Trial) -> int:
    """Give a node a disk that holds 100 KB."""
    small = trial.folder.with_name("small")
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)], check=True)
    try:
        with trial.start_cluster(env_vars={"TMPDIR": str(small)}):
            trial.start()
            return trial.finish()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


def break_library(trial: Trial) -> int:
    """Give a node an environment that lacks what serves or draws."""
    broken = trial.folder.with_name("broken")
    broken.mkdir()
    for name in ("transformers", "diffusers"):
        (broken / f"{name}.py").write_text(f"raise ImportError('{name} is broken here')\n", encoding="utf-8")
    with trial.start_cluster(env_vars=import_first(broken)):
        trial.start()
        return trial.finish()


def stand_apart(trial: Trial) -> int:
    """Let the nodes see neither the project's folder nor its files: all is sent."""
    empty, home = trial.folder.with_name("empty"), trial.folder.with_name("home")
    empty.mkdir()
    home.mkdir()
    num_nodes, trial.num_nodes = trial.num_nodes, 0
    with trial.start_cluster():
        trial.num_nodes = num_nodes
        text = (trial.folder / "params.yaml").read_text(encoding="utf-8")
        (trial.folder / "params.yaml").write_text(text.replace("num_workers: 0", f"num_workers: {num_nodes}", 1))
        start = [
            sys.executable,
            "-c",
            "from ray.scripts.scripts import main; main()",
            "start",
            "--block",
            "--num-cpus=1",
        ]
        start += [f"--address={trial.cluster.address}", f"--object-store-memory={100 << 20}"]
        words = " ".join(f"'{word}'" for word in start)
        script = f"mount --bind {empty} {trial.folder} && cd / && exec {words}"
        nodes = [
            subprocess.Popen(["unshare", "-m", "sh", "-c", script], env=os.environ | {"HOME": str(home)}, stdout=-3)
            for _ in range(num_nodes)
        ]
        try:
            trial.start()
            return trial.finish()
        finally:
            for node in nodes:
                node.terminate()


FAULTS: dict[str, Callable[[Trial], int]] = {
    "none": run_nothing,
    "apart": stand_apart,
    "worker": kill_worker,
    "child": kill_child,
    "node": remove_node,
    "driver": kill_driver,
    "slow": slow_node,
    "network": cut_node,
    "disk": fill_disk,
    "library": break_library,
    "lost": lose_file,
    "changed": change_answer,
    "device": use_other_device,
}


def read_records(folder: Path) -> dict[str, list[Any]]:
    """Return the records of an evaluation by eval, without latencies."""
    return {
        path.stem: [
            {key: value for key, value in json.loads(line).items() if key != "latency_s"}
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in sorted(folder.glob("*.jsonl"))
    }


def describe(trial: Trial, code: int, serial: dict[str, list[Any]]) -> str:
    """Say how a trial ended: how many cases are lost, doubled or another, or why there are none."""
    folder = trial.folder / "build" / trial.product / "evaluations" / trial.candidate
    if code:
        return f"refused: {trial.said[-1].removeprefix('quantgate evaluate: ')}"
    lost = doubled = other = 0
    for name, expected in serial.items():
        came = read_records(folder).get(name, [])
        ids = [record["case_id"] for record in came]
        lost += len({record["case_id"] for record in expected} - set(ids))
        doubled += len(ids) - len(set(ids))
        other += sum(a != b for a, b in zip(expected, came, strict=False))
    counts = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["shards"]
    return (
        f"{lost} lost, {doubled} twice, {other} other of {sum(map(len, serial.values()))}; {counts['num_attempts']} "
        f"attempts at {counts['num_shards']} shards, {counts['num_unfinished']} unfinished"
    )


def main() -> None:
    """Run the faults in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidate", default="shots")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS))
    options = parser.parse_args()
    product = find_owner(load_params(), options.candidate, kind=Product).name
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        shutil.copytree(ROOT, home / "serial", ignore=NOT_COPIED)
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "stages.evaluate", options.candidate],
            cwd=home / "serial",
            check=True,
            capture_output=True,
        )
        print(f"one process after another: {time.monotonic() - start:.1f} s\n")
        serial = read_records(home / "serial/build" / product / "evaluations" / options.candidate)
        print("| fault | s | what came of it |\n|---|---:|---|", flush=True)
        for name in options.only:
            folder = home / name / "project"
            shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
            shutil.rmtree(folder / "build" / product / "evaluations", ignore_errors=True)
            trial = Trial(folder, product, options.candidate, options.nodes)
            start = time.monotonic()
            code = FAULTS[name](trial)
            print(f"| {name} | {time.monotonic() - start:.0f} | {describe(trial, code, serial)} |", flush=True)
            for line in trial.said:
                if any(words in line for words in ("another replica", "dead", "failed starts")):
                    print(f"  {name}: {line.strip()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
