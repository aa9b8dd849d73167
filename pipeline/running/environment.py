"""What the numbers were made on: library versions, the machine, and whether its GPU can be used.

Quality depends on the libraries alone, latency on the machine as well, so the two are separate
records and separate dependencies in dvc.yaml. Nothing here imports torch, so that on a CPU machine
the record costs milliseconds: its version and build are read from the installed files, and a GPU is
proved by allocating on it in a child process. Covers Linux with NVIDIA GPUs, and the CPU of
other systems; whether a checkpoint fits in memory is in `memory.py`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline.records.files import write_text
from pipeline.records.fingerprints import read_environment
from pipeline.records.record_files import Record

# Every package whose version can change an answer; mlflow, dvc and the gate's own are not among them.
LIBRARIES = (
    "accelerate",
    "compressed-tensors",
    "datasets",
    "llmcompressor",
    "lm-eval",
    "numpy",
    "pillow",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
# The instruction sets that choose another CPU kernel, hence other rounding and another speed.
INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
PROOF_TIMEOUT_S = 120

# Runs in a child: importing torch takes seconds, and a broken driver can take the process with it.
_PROOF_SCRIPT = """
import json, torch
devices = []
for index in range(torch.cuda.device_count()):
    try:
        ones = torch.ones(1 << 20, device=f"cuda:{index}")
        error = None if float((ones + ones).sum()) == float(1 << 21) else "wrong sum"
    except Exception as exception:
        error = (str(exception).strip().splitlines() or [repr(exception)])[0]
    devices.append({"capability": "sm_%d%d" % torch.cuda.get_device_capability(index), "error": error})
print(json.dumps({"architectures": torch.cuda.get_arch_list(), "devices": devices, "error": None}))
"""


class Gpu(Record):
    """One GPU as its driver names it."""

    name: str
    driver: str
    memory_mib: int


class ProvedDevice(Record):
    """One device after torch has tried to allocate and add on it; `error` is None when that worked."""

    capability: str  # "sm_90"
    error: str | None


class GpuProof(Record):
    """What torch could do with the GPUs; `error` is set when torch could not even start."""

    architectures: tuple[str, ...] = ()  # what this build of torch has kernels for
    devices: tuple[ProvedDevice, ...] = ()
    error: str | None = None


class Machine(Record):
    """Everything about the machine that can change a speed; no host name, time or free memory."""

    os: str
    cpu: str
    instruction_sets: tuple[str, ...]
    num_cores: int  # that this process may use
    memory_mib: int  # that this process may use
    num_torch_threads: int  # a torch process takes when nothing sets it
    torch_build: str  # "cpu" or "cuda 13.0"
    gpus: tuple[Gpu, ...] = ()
    gpus_hidden: bool = False  # CUDA_VISIBLE_DEVICES hides all of them
    gpu_proof: GpuProof | None = None


def read_libraries() -> dict[str, str]:
    """Return the version of every library that can change an answer; "absent" when not installed."""
    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def read_machine() -> Machine:
    """Read the machine's facts; proves the GPU when there is one and torch was built for it."""
    cpu, flags = parse_cpuinfo(_read_text(Path("/proc/cpuinfo")))
    num_cores = count_cores()
    gpus = find_gpus()
    build = read_torch_build()
    hidden = bool(gpus) and os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return Machine(
        os=_name_os(),
        cpu=cpu or platform.processor() or platform.machine(),
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in flags),
        num_cores=num_cores,
        memory_mib=count_memory_mib(),
        num_torch_threads=int(threads) if threads.isdigit() else num_cores,
        torch_build=build,
        gpus=gpus,
        gpus_hidden=hidden,
        gpu_proof=prove_gpus() if gpus and not hidden and build != "cpu" else None,
    )


def list_gpu_problems(machine: Machine) -> list[str]:
    """Return a line for each reason why a GPU of this machine will not or can't be used."""
    if not machine.gpus or machine.gpus_hidden:
        return []
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    if machine.torch_build == "cpu":
        return [
            f"this machine has a GPU ({names}) but torch is a CPU-only build, so everything runs on the CPU; "
            "for the GPU: QUANTGATE_TORCH_INDEX=https://download.pytorch.org/whl/cu130 make setup"
        ]
    proof = machine.gpu_proof
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
    return f"allocating on cuda:{index} failed: {device.error}"


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


def prove_gpus() -> GpuProof:
    """Allocate and add on every visible GPU, in a child process."""
    command = [sys.executable, "-W", "ignore", "-c", _PROOF_SCRIPT]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=PROOF_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return GpuProof(error=f"allocating took more than {PROOF_TIMEOUT_S} s")
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        return GpuProof(error=lines[-1])
    return GpuProof.model_validate(json.loads(child.stdout))


def read_hardware(device: str) -> dict[str, str]:
    """Return what of the hardware decides how a model's sums round.

    Args:
        device: "cpu", or the GPU's name.
    """
    if device != "cpu":
        return {"device": device}
    _, flags = parse_cpuinfo(_read_text(Path("/proc/cpuinfo")))
    return {
        "device": f"cpu {platform.machine()}",
        "instruction_sets": " ".join(name for name in INSTRUCTION_SETS if name in flags),
    }


def read_machine_facts() -> dict[str, Any]:
    """Return what a process that runs torch finds of its environment and hardware, by section of a fingerprint."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"environment": read_environment(), "hardware": read_hardware(device)}


def find_gpus() -> tuple[Gpu, ...]:
    """List NVIDIA GPUs by nvidia-smi, or by the driver's own files where that is not installed."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
        child = subprocess.run(query, capture_output=True, text=True, timeout=PROOF_TIMEOUT_S)
        if child.returncode == 0:
            return parse_nvidia_smi(child.stdout)
    driver = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", _read_text(Path("/proc/driver/nvidia/version")))
    names = [
        re.search(r"Model:\s*(.+)", _read_text(path))
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    ]
    if not names and Path("/dev/nvidia0").exists():
        names = [None]
    return tuple(
        Gpu(
            name=name.group(1).strip() if name else "NVIDIA GPU",
            memory_mib=0,
            driver=driver.group() if driver else "unknown",
        )
        for name in names
    )


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Read `name, driver, MiB` lines; unified-memory GPUs answer "[N/A]" for the size."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") >= 2]
    return tuple(
        Gpu(name=", ".join(row[:-2]), driver=row[-2], memory_mib=int(row[-1]) if row[-1].isdigit() else 0)
        for row in rows
    )


def read_gpu_free_mib() -> tuple[int, ...]:
    """Read the memory of each NVIDIA GPU that no process holds now, in MiB; empty where the driver won't say."""
    if not shutil.which("nvidia-smi"):
        return ()
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    child = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return parse_gpu_memory(child.stdout) if child.returncode == 0 else ()


def parse_gpu_memory(text: str) -> tuple[int, ...]:
    """Return what is free from `used, total` lines in MiB; GPUs of unified memory answer "[N/A]" and are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(int(row[1]) - int(row[0]) for row in rows if len(row) == 2 and all(map(str.isdigit, row)))


def read_torch_build() -> str:
    """Return "cpu" or "cuda <version>" from torch's files, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "absent"
    text = _read_text(Path(spec.origin).with_name("version.py"))
    match = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return f"cuda {match.group(1)}" if match else "cpu"


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Return the CPU's model name and its flags from the text of /proc/cpuinfo."""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return model.group(1).strip() if model else "", frozenset(flags.group(1).split() if flags else ())


def count_cores() -> int:
    """Count the cores this process may use: its affinity mask, capped by a container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read_text(Path("/sys/fs/cgroup/cpu.max")).strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def count_memory_mib() -> int:
    """Count the memory this process may use, in MiB: the machine's, capped by a container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, cgroup v1
        text = _read_text(Path("/sys/fs/cgroup") / limit).strip()
        total = min(total, int(text)) if text.isdigit() else total
    return total >> 20


def write_if_changed(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON, and leave an equal file alone: its time decides how fast DVC looks past it."""
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    if _read_text(path) != text:
        write_text(path, text)


def _name_os() -> str:
    name = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read_text(Path("/etc/os-release")), re.MULTILINE)
    return f"{platform.system()} {platform.machine()}" + (f", {name.group(1)}" if name else "")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
