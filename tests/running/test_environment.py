"""The environment record: what it says about a machine, from facts rather than from this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.running.environment import (
    LIBRARIES,
    Gpu,
    GpuProof,
    Machine,
    ProvedDevice,
    is_architecture_covered,
    list_gpu_problems,
    parse_cpuinfo,
    parse_gpu_memory,
    parse_nvidia_smi,
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


def proof(
    capability: str = "sm_90", error: str | None = None, architectures: tuple[str, ...] = ("sm_80", "sm_90")
) -> GpuProof:
    return GpuProof(architectures=architectures, devices=(ProvedDevice(capability=capability, error=error),))


def test_cpu_machine_has_no_problem() -> None:
    assert list_gpu_problems(machine()) == []


def test_cpu_only_torch_on_a_gpu_machine_is_said_plainly() -> None:
    (line,) = list_gpu_problems(machine(gpus=(H100,)))
    assert "NVIDIA H100" in line and "CPU-only" in line and "QUANTGATE_TORCH_INDEX" in line


def test_hidden_gpu_is_a_choice_not_a_problem() -> None:
    assert list_gpu_problems(machine(gpus=(H100,), gpus_hidden=True)) == []


def test_working_gpu_is_no_problem() -> None:
    assert list_gpu_problems(machine(gpus=(H100,), torch_build="cuda 13.0", gpu_proof=proof())) == []


@pytest.mark.parametrize(
    ("gpu_proof", "expected"),
    [
        (GpuProof(error="libcuda.so.1: cannot open"), "libcuda.so.1: cannot open"),
        (GpuProof(architectures=("sm_90",)), "driver 560.35"),
        (proof("sm_70", "no kernel image", ("sm_80", "sm_90")), "sm_70, and this build of torch has kernels for sm_80"),
        (proof("sm_90", "out of memory"), "allocating on cuda:0 failed: out of memory"),
        (None, "not tried"),
    ],
    ids=["torch-cannot-start", "torch-sees-none", "architecture-missing", "allocation-fails", "no-proof"],
)
def test_unusable_gpu_names_the_reason(gpu_proof: GpuProof | None, expected: str) -> None:
    (line,) = list_gpu_problems(machine(gpus=(H100,), torch_build="cuda 13.0", gpu_proof=gpu_proof))
    assert expected in line


@pytest.mark.parametrize(
    ("capability", "architectures", "covered"),
    [
        ("sm_90", ("sm_80", "sm_90"), True),
        ("sm_86", ("sm_80",), True),  # the same major, newer minor: its binaries run
        ("sm_80", ("sm_86",), False),
        ("sm_90", ("sm_80",), False),
        ("sm_90", ("sm_80", "compute_80"), True),  # PTX is compiled on the spot
        ("sm_70", ("compute_80",), False),
        ("sm_120", ("sm_90",), False),  # two digits of major
        ("sm_90", ("sm_90a",), True),
        ("sm_90", (), False),
    ],
)
def test_architecture_rule(capability: str, architectures: tuple[str, ...], covered: bool) -> None:
    assert is_architecture_covered(capability, architectures) is covered


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


def test_libraries_cover_what_changes_an_answer() -> None:
    versions = read_libraries()
    assert set(versions) == {"python", *LIBRARIES}
    assert "absent" not in versions.values()
    assert versions["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


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
