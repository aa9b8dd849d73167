"""Whether torch can use the GPUs of this machine, proved by doing: allocate, run kernels, read back, check the value.

The proof runs in a child process: importing torch takes 5 to 12 seconds, and a broken driver can take the process with
it. So a proof that went well holds until something that it rests on changes: the machine's facts, torch, which GPUs
are visible, or the system's start. nvidia-smi is asked each time. A GPU that has fallen off its bus, or a driver that
was replaced, changes those facts. A driver that dies without a trace there is found by the stage that runs next, and
ends it in one line (`pipeline/running/gpu_failures.py`).

How much of a card others hold is asked each time and is in no record: it says nothing about the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.records.digests import digest_json
from pipeline.records.record_files import Record, read_record, write_record
from pipeline.running.environment import VISIBLE, Machine, query_nvidia_smi, read_libraries
from pipeline.running.gpu_failures import MAX_HELD_FRACTION

PROOF_FILE = "gpu_proof.json"  # in the folder of stage env
PROOF_TIMEOUT_S = 120
_PROJECT = Path(__file__).resolve().parents[2]  # that the child imports from, wherever this process runs
_CHILD = "from pipeline.running.gpu_proof import prove_here; print(prove_here().model_dump_json())"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SIDE = 256  # of the product's matrices: a number that bfloat16 holds exactly


class ProvedDevice(Record):
    """One device after torch has worked on it; `error` is None when that went well."""

    capability: str  # "sm_90"
    error: str | None


class GpuProof(Record):
    """What torch could do with the GPUs; `error` is set when torch could not even start."""

    architectures: tuple[str, ...] = ()  # what this build of torch has kernels for
    devices: tuple[ProvedDevice, ...] = ()
    error: str | None = None

    @property
    def is_good(self) -> bool:
        """Every device that is there was worked on."""
        return bool(self.devices) and self.error is None and not any(device.error for device in self.devices)


class _KeptProof(Record):
    """A proof that went well, and the digest of what it rests on."""

    key: str
    proof: GpuProof


def prove_gpus(machine: Machine, folder: Path) -> GpuProof | None:
    """Work on every visible GPU in a child process, unless a proof that holds is there.

    Args:
        machine: its facts.
        folder: where the proof is kept.

    Returns:
        The proof; None where torch has no GPU to use.
    """
    if not machine.uses_gpu:
        return None
    path, key = folder / PROOF_FILE, _digest_grounds(machine)
    with contextlib.suppress(EvidenceError):
        kept = read_record(path, _KeptProof)
        if kept.key == key:
            return kept.proof
    proof = _prove_in_child()
    if proof.is_good:
        write_record(path, _KeptProof(key=key, proof=proof))
    return proof


def _digest_grounds(machine: Machine) -> str:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    visible = os.environ.get(VISIBLE)
    return digest_json([machine.model_dump(), read_libraries()["torch"], visible, boot])


def _prove_in_child() -> GpuProof:
    command = [sys.executable, "-W", "ignore", "-c", _CHILD]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=PROOF_TIMEOUT_S, cwd=_PROJECT)
    except subprocess.TimeoutExpired:
        return GpuProof(error=f"the proof took more than {PROOF_TIMEOUT_S} s")
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        return GpuProof(error=lines[-1])
    return GpuProof.model_validate(json.loads(child.stdout.splitlines()[-1]))


def prove_here() -> GpuProof:
    """Work on every visible GPU in this process."""
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        # older ones have no bfloat16
        dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
        devices.append(ProvedDevice(capability="sm_%d%d" % capability, error=work_on(f"cuda:{index}", dtype)))  # noqa: UP031 - a tuple
    return GpuProof(architectures=tuple(torch.cuda.get_arch_list()), devices=tuple(devices))


def work_on(device: str, dtype: Any) -> str | None:
    """Allocate on a device, add, multiply matrices, and read back; return what went wrong, or None."""
    import torch

    try:
        ones = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
        total = float((ones + ones).float().sum())
        product = (ones @ ones).float().cpu()
    except Exception as error:  # of the driver, a library or torch
        return (str(error).strip().splitlines() or [repr(error)])[0]
    if total != 2 * _SIDE**2 or not bool((product == _SIDE).all()):
        return f"wrong numbers: sum {total:g}, product {float(product[0, 0]):g}"
    return None


def list_gpu_problems(machine: Machine, proof: GpuProof | None) -> list[str]:
    """Return a line for each reason why a GPU of this machine will not or can't be used."""
    if not machine.gpus or machine.gpus_hidden:
        return []
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    if machine.torch_build == "cpu":
        return [
            f"this machine has a GPU ({names}) but torch is a CPU-only build, so everything runs on the CPU; "
            "for the GPU: QUANTGATE_TORCH_INDEX=https://download.pytorch.org/whl/cu130 make setup"
        ]
    if proof is None or proof.error:
        reason = proof.error if proof else "it was not tried"
        return [f"torch ({machine.torch_build}) can't use the GPU ({names}): {reason}; see nvidia-smi"]
    if not proof.devices:
        driver = machine.gpus[0].driver
        return [
            f"torch ({machine.torch_build}) sees no GPU, though the machine has {names} with driver {driver}; "
            "the driver may be older than this build of torch needs"
        ]
    return [_format_device_problem(index, device, proof) for index, device in enumerate(proof.devices) if device.error]


def _format_device_problem(index: int, device: ProvedDevice, proof: GpuProof) -> str:
    if not is_architecture_covered(device.capability, proof.architectures):
        return (
            f"cuda:{index} is {device.capability}, and this build of torch has kernels for "
            f"{', '.join(proof.architectures)} only; install a build that lists it"
        )
    return f"working on cuda:{index} failed: {device.error}"


def is_architecture_covered(capability: str, architectures: tuple[str, ...]) -> bool:
    """Whether a build runs on a device: same major and no newer minor, or PTX that is no newer."""
    major, minor = _split_architecture(capability)
    for architecture in architectures:
        built_major, built_minor = _split_architecture(architecture)
        if architecture.startswith("compute_") and (built_major, built_minor) <= (major, minor):
            return True
        if built_major == major and built_minor <= minor:
            return True
    return False


def _split_architecture(name: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", name)
    return int(digits[:-1] or 0), int(digits[-1:] or 0)


def ask_nvidia_smi() -> str:
    """Return "index, used MiB, total MiB" of each visible GPU, a line each; nothing where nvidia-smi can't say."""
    return query_nvidia_smi("index", "memory.used", "memory.total", visible=os.environ.get(VISIBLE))


def list_held_gpus(machine: Machine, ask: Callable[[], str] = ask_nvidia_smi) -> list[str]:
    """Return a line for each visible GPU of which other processes hold a large part: before any work all are others.

    Args:
        machine: its facts; one whose torch uses no GPU has nothing to say.
        ask: returns what `ask_nvidia_smi` does.
    """
    lines = []
    for line in ask().splitlines() if machine.uses_gpu else []:
        index, used, total = (cell.strip() for cell in line.split(","))
        # unified memory answers "[N/A]"
        if used.isdigit() and total.isdigit() and int(used) > MAX_HELD_FRACTION * int(total):
            lines.append(
                f"GPU {index}: other processes hold {int(used):,} of {int(total):,} MiB, {int(total) - int(used):,} "
                "MiB are free; end them (nvidia-smi lists them), or hide the GPU with CUDA_VISIBLE_DEVICES"
            )
    return lines
