"""The environment record: what it says about a machine, from facts rather than from this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.running import environment
from pipeline.running.environment import (
    LIBRARIES,
    Gpu,
    Machine,
    find_gpus,
    list_visible_gpus,
    parse_cpuinfo,
    parse_gpu_memory,
    parse_nvidia_smi,
    pick_visible_lines,
    query_nvidia_smi,
    read_available_mib,
    read_gpu_free_mib,
    read_libraries,
    read_machine,
    write_if_changed,
)

ROOT = Path(__file__).resolve().parents[2]
H100 = Gpu(name="NVIDIA H100", driver="560.35", memory_mib=81559)


def machine(**facts: Any) -> Machine:
    """A CPU machine, with some facts changed."""
    usual: dict[str, Any] = dict(
        os="Linux x86_64",
        cpu="a CPU",
        instruction_sets=("avx2",),
        num_cores=2,
        memory_mib=8000,
        num_torch_threads=2,
        torch_build="cpu",
    )
    return Machine(**(usual | facts))


def test_cpuinfo_of_two_kinds_of_machine() -> None:
    assert parse_cpuinfo("model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f\n\nflags: other") == (
        "AMD EPYC",
        frozenset({"fpu", "avx2", "avx512f"}),
    )
    assert parse_cpuinfo("Features\t: fp asimd bf16\n") == ("", frozenset({"fp", "asimd", "bf16"}))
    assert parse_cpuinfo("") == ("", frozenset())


def test_nvidia_smi_answers() -> None:
    text = "NVIDIA H100, 560.35, 81559\nNVIDIA GB10, 580.95, [N/A]\n"
    assert [(g.name, g.driver, g.memory_mib) for g in parse_nvidia_smi(text)] == [
        ("NVIDIA H100", "560.35", 81559),
        ("NVIDIA GB10", "580.95", 0),
    ]
    assert parse_nvidia_smi("No devices were found\n") == ()


@pytest.mark.parametrize(
    ("visible", "names", "seen"),
    [
        (None, ("0", "1", "2"), ["80", "40", "24"]),
        ("2,0", ("2", "0"), ["80", "24"]),
        ("0,1,2,3", ("0", "1", "2"), ["80", "40", "24"]),
        ("3,0", (), []),
        ("GPU-b1", ("GPU-b1",), ["40"]),
        ("GPU-a, MIG-77", ("GPU-a", "MIG-77"), ["80", "40", "24"]),
        ("1,-1,2", ("1",), ["40"]),
        ("", (), []),
        ("-1", (), []),
    ],
)
def test_gpus_are_those_that_the_environment_lets_through(
    visible: str | None, names: tuple[str, ...], seen: list[str]
) -> None:
    """CUDA hides what follows an index that no GPU has; a server that is given such an index runs on the CPU."""
    assert list_visible_gpus(3, visible) == names
    assert pick_visible_lines(["GPU-a0, 80", "GPU-b1, 40", "GPU-c2, 24"], visible) == seen


def fake_nvidia_smi(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], str]) -> None:
    """Let nvidia-smi answer a query."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, answer(command[1].removeprefix("--query-gpu=")), "")

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", run)


def test_a_machine_has_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "uuid,name,driver_version,memory.total": "GPU-a0, NVIDIA A, 560.35, 81559\nGPU-b1, NVIDIA B, 560.35, 24564\n",
        "uuid,memory.used,memory.total": "GPU-a0, 41000, 81559\nGPU-b1, 564, 24564\n",
    }
    fake_nvidia_smi(monkeypatch, answers.__getitem__)
    for visible, names, free in (("1", ["NVIDIA B"], (24000,)), ("0,1", ["NVIDIA A", "NVIDIA B"], (40559, 24000))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.name for gpu in read_machine().gpus] == names
        assert read_gpu_free_mib() == free
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    hidden = read_machine()
    assert len(hidden.gpus) == 2 and hidden.gpus_hidden and read_gpu_free_mib() == ()


def test_a_driver_that_hangs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(query: str) -> str:
        raise subprocess.TimeoutExpired("nvidia-smi", 120)

    fake_nvidia_smi(monkeypatch, hang)
    monkeypatch.setattr(environment, "_read_text", lambda path: "")
    assert read_gpu_free_mib() == () and query_nvidia_smi("name") == ""
    find_gpus()


def test_libraries_cover_what_changes_an_answer() -> None:
    versions = read_libraries()
    assert set(versions) == {"python", *LIBRARIES}
    assert "absent" not in versions.values()
    assert versions["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("facts", "uses"),
    [
        ({}, False),
        ({"gpus": (H100,)}, False),
        ({"gpus": (H100,), "torch_build": "cuda 13.0"}, True),
        ({"gpus": (H100,), "torch_build": "cuda 13.0", "gpus_hidden": True}, False),
        ({"gpus": (H100,), "torch_build": "absent"}, False),
    ],
    ids=["cpu", "cpu-build", "gpu", "hidden", "no-torch"],
)
def test_torch_uses_a_gpu_that_it_was_built_for_and_sees(facts: dict[str, Any], uses: bool) -> None:
    assert machine(**facts).uses_gpu is uses


def test_record_is_the_same_twice() -> None:
    """A value that drifts (free memory, a clock rate) would make latency stale at every run."""
    assert read_machine() == read_machine()


def test_reading_the_machine_does_not_import_torch() -> None:
    script = (
        "import sys; from pipeline.running.environment import *; read_libraries(); read_machine(); "
        "print('torch' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert child.stdout.strip() == "False", child.stderr


def test_equal_content_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "env" / "machine.json"
    write_if_changed(path, {"cores": 2})
    before = path.stat().st_ino
    write_if_changed(path, {"cores": 2})
    assert path.stat().st_ino == before
    write_if_changed(path, {"cores": 4})
    assert path.stat().st_ino != before


def test_free_gpu_memory_is_what_no_process_holds() -> None:
    assert parse_gpu_memory("1024, 81559\n0, 24564\n[N/A], [N/A]\n") == (80535, 24564)
    assert parse_gpu_memory("") == ()


def test_available_memory_respects_a_smaller_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8192000 kB\nMemAvailable: 4096000 kB\n")
    assert read_available_mib(8000, meminfo) == 4000
    assert read_available_mib(2000, meminfo) == 2000
    assert read_available_mib(2000, tmp_path / "none") == 2000


@pytest.mark.parametrize(
    ("files", "cores", "mib"),
    [
        ({}, 64, 65_536),
        ({"cpu.max": "max 100000", "memory.max": "max"}, 64, 65_536),
        ({"cpu.max": "250000 100000", "memory.max": "4294967296"}, 2, 4_096),  # a container, by v2
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2, 65_536),  # by v1
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64, 65_536),
        ({"memory/slurm/job/memory.limit_in_bytes": "4294967296"}, 64, 4_096),
        ({"slurm/job/memory.max": "4294967296", "slurm/job/step/memory.max": "max"}, 64, 4_096),  # of a batch system
        ({"slurm/job/step/cpu.max": "400000 100000", "slurm/cpu.max": "800000 100000"}, 4, 65_536),
    ],
)
def test_cores_and_memory_are_those_that_the_control_groups_leave(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int, mib: int
) -> None:
    """Sixty-four servers were started on two cores, and a job of 4 GiB was told that it had the node's."""
    held = {f"/sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}
    held["/proc/self/cgroup"] = "4:memory:/slurm/job\n2:cpu,cpuacct:/slurm/job\n0::/slurm/job/step\n"
    monkeypatch.setattr(environment, "_read_text", lambda path: held.get(str(path), ""))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 16 << 20, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert (environment.count_cores(), environment.count_memory_mib()) == (cores, mib)
