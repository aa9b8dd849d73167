"""The proof of a GPU: what it does on a device, how long it holds, and what is said of a GPU that can't be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.running import gpu_proof as module
from pipeline.running.gpu_proof import (
    PROOF_FILE,
    GpuProof,
    ProvedDevice,
    is_architecture_covered,
    list_gpu_problems,
    list_held_gpus,
    prove_gpus,
    prove_here,
    work_on,
)
from tests.running.test_environment import H100, machine

GPU_MACHINE = machine(gpus=(H100,), torch_build="cuda 13.0")


def proof(
    capability: str = "sm_90", error: str | None = None, architectures: tuple[str, ...] = ("sm_80", "sm_90")
) -> GpuProof:
    return GpuProof(architectures=architectures, devices=(ProvedDevice(capability=capability, error=error),))


def test_cpu_machine_has_no_problem() -> None:
    assert list_gpu_problems(machine(), None) == []


def test_cpu_only_torch_on_a_gpu_machine_is_said_plainly() -> None:
    (line,) = list_gpu_problems(machine(gpus=(H100,)), None)
    assert "NVIDIA H100" in line and "CPU-only" in line and "QUANTGATE_TORCH_INDEX" in line


def test_hidden_gpu_is_a_choice_not_a_problem() -> None:
    assert list_gpu_problems(machine(gpus=(H100,), gpus_hidden=True), None) == []


def test_working_gpu_is_no_problem() -> None:
    assert list_gpu_problems(GPU_MACHINE, proof()) == []


@pytest.mark.parametrize(
    ("gpu_proof", "expected"),
    [
        (GpuProof(error="libcuda.so.1: cannot open"), "libcuda.so.1: cannot open"),
        (GpuProof(architectures=("sm_90",)), "driver 560.35"),
        (proof("sm_70", "no kernel image", ("sm_80", "sm_90")), "sm_70, and this build of torch has kernels for sm_80"),
        (proof("sm_90", "out of memory"), "working on cuda:0 failed: out of memory"),
        (None, "not tried"),
    ],
    ids=["torch-cannot-start", "torch-sees-none", "architecture-missing", "allocation-fails", "no-proof"],
)
def test_unusable_gpu_names_the_reason(gpu_proof: GpuProof | None, expected: str) -> None:
    (line,) = list_gpu_problems(GPU_MACHINE, gpu_proof)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_device_that_computes_right_has_no_error(dtype: torch.dtype) -> None:
    assert work_on("cpu", dtype) is None


def test_a_device_that_is_not_there_or_computes_wrong_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work_on("meta", torch.bfloat16)
    monkeypatch.setattr(module, "_SIDE", 257)  # bfloat16 rounds it, as a broken kernel would
    assert str(work_on("cpu", torch.bfloat16)).startswith("wrong numbers: ")


def test_without_a_gpu_nothing_was_worked_on() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert prove_here().devices == () and prove_gpus(machine(), Path("nowhere")) is None


class Child:
    """Stands for the child process, and counts its runs."""

    def __init__(self, *proofs: GpuProof) -> None:
        self.proofs = list(proofs)
        self.num_runs = 0

    def __call__(self) -> GpuProof:
        self.num_runs += 1
        return self.proofs[min(self.num_runs, len(self.proofs)) - 1]


def run_twice(child: Child, folder: Path, monkeypatch: pytest.MonkeyPatch, second: Any = GPU_MACHINE) -> int:
    monkeypatch.setattr(module, "_prove_in_child", child)
    for facts in (GPU_MACHINE, second):
        assert prove_gpus(facts, folder) == child.proofs[min(child.num_runs, len(child.proofs)) - 1]
    return child.num_runs


def test_a_good_proof_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch takes longer than all else of a run that has nothing to do."""
    assert run_twice(Child(proof()), tmp_path, monkeypatch) == 1


@pytest.mark.parametrize("bad", [proof(error="no memory"), GpuProof(error="no driver"), GpuProof()], ids=repr)
def test_a_bad_proof_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: GpuProof) -> None:
    assert run_twice(Child(bad, proof()), tmp_path, monkeypatch) == 2


def test_another_machine_start_or_choice_of_gpus_is_proved_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = machine(gpus=(H100, H100), torch_build="cuda 13.0")
    assert run_twice(Child(proof()), tmp_path / "driver", monkeypatch, other) == 2
    child = Child(proof())
    assert run_twice(child, tmp_path, monkeypatch) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    prove_gpus(GPU_MACHINE, tmp_path)
    boot = tmp_path / "boot_id"
    boot.write_text("another start\n")
    monkeypatch.setattr(module, "_BOOT_ID", boot)
    prove_gpus(GPU_MACHINE, tmp_path)
    (tmp_path / PROOF_FILE).write_text("{")
    prove_gpus(GPU_MACHINE, tmp_path)
    assert child.num_runs == 4


def test_a_child_that_ends_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHILD", "raise SystemExit('libcuda.so.1: cannot open')")
    assert module._prove_in_child() == GpuProof(error="libcuda.so.1: cannot open")


def test_the_child_finds_the_project_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(module, "_CHILD", "import pipeline; raise SystemExit(pipeline.__name__)")
    assert module._prove_in_child() == GpuProof(error="pipeline")


def test_a_card_that_others_hold_is_named_with_what_is_free() -> None:
    said = "0, 512, 81559\n3, 41000, 81559\n4, [N/A], [N/A]\n"
    (line,) = list_held_gpus(GPU_MACHINE, lambda: said)
    assert line.startswith("GPU 3: other processes hold 41,000 of 81,559 MiB, 40,559 MiB are free; end them")
    assert list_held_gpus(machine(), lambda: said) == list_held_gpus(GPU_MACHINE, lambda: "") == []
