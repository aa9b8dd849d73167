"""What the numbers were made on: library versions and the machine.

Quality depends on the libraries alone, latency on the machine as well, so the two are separate
records and separate dependencies in dvc.yaml. Nothing here imports torch, so that the record costs
milliseconds: its version and build are read from the installed files. Covers Linux with NVIDIA GPUs, and
the CPU of other systems. Whether torch can use a GPU is in `gpu_proof.py`, whether a checkpoint fits in memory in
`memory.py`.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.records.files import write_text
from pipeline.records.fingerprints import read_environment
from pipeline.records.record_files import Record
from pipeline.settings.execution import MAX_WORKERS

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
NVIDIA_SMI_TIMEOUT_S = 120
VISIBLE = "CUDA_VISIBLE_DEVICES"
_CGROUPS = Path("/sys/fs/cgroup")
_CFS = ("quota", "period")  # of v1: microseconds of all cores together, in so many of the clock


class Gpu(Record):
    """One GPU as its driver names it."""

    name: str
    driver: str
    memory_mib: int


class Machine(Record):
    """Everything about the machine that can change a speed; no host name, time or free memory."""

    os: str
    cpu: str
    instruction_sets: tuple[str, ...]
    num_cores: int  # that this process may use
    memory_mib: int  # that this process may use
    num_torch_threads: int  # a torch process takes when nothing sets it
    torch_build: str  # "cpu" or "cuda 13.0"
    gpus: tuple[Gpu, ...] = ()  # that CUDA_VISIBLE_DEVICES lets through
    gpus_hidden: bool = False  # it hides all of them, so that `gpus` are those of the machine

    @property
    def uses_gpu(self) -> bool:
        """Torch has a GPU to use here; whether it can is what `gpu_proof.py` finds out."""
        return bool(self.gpus) and not self.gpus_hidden and self.torch_build.startswith("cuda")


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
    """Read the machine's facts."""
    cpu, flags = parse_cpuinfo(_read_text(Path("/proc/cpuinfo")))
    num_cores = count_cores()
    visible = os.environ.get(VISIBLE)
    is_hidden = visible in {"", "-1"}
    gpus = find_gpus(visible=None if is_hidden else visible)
    build = read_torch_build()
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
        gpus_hidden=bool(gpus) and is_hidden,
    )


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


def list_visible_gpus(num_gpus: int, visible: str | None) -> tuple[str, ...]:
    """Return the GPUs that CUDA lets a process use, as CUDA_VISIBLE_DEVICES names them.

    Args:
        num_gpus: of the machine.
        visible: CUDA_VISIBLE_DEVICES, where it is set: indices or UUIDs. An index that no GPU has ends the list.
    """
    if visible is None:
        return tuple(str(index) for index in range(num_gpus))
    names = []
    for name in map(str.strip, visible.split(",")):
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < num_gpus):
            break
        names.append(name)
    return tuple(names)


def pick_visible_lines(lines: Sequence[str], visible: str | None) -> list[str]:
    """Return the lines "UUID, ..." of the GPUs that CUDA lets a process use, without their UUIDs.

    Args:
        lines: of each GPU of the machine.
        visible: as for `list_visible_gpus`. All GPUs count where it names instances of MIG: no line has their UUIDs.
    """
    names = list_visible_gpus(len(lines), visible)
    if any(name.startswith("MIG-") for name in names):
        names = list_visible_gpus(len(lines), None)
    indices = {int(name) for name in names if name.isdigit()}
    uuids = tuple(name for name in names if not name.isdigit())  # CUDA takes the start of one, too
    return [
        line.partition(",")[2].strip() for index, line in enumerate(lines) if index in indices or line.startswith(uuids)
    ]


def query_nvidia_smi(*fields: str, visible: str | None = None) -> str:
    """Ask nvidia-smi about each GPU; return a line of CSV each, or nothing where it is absent, fails or hangs.

    Args:
        fields: that `nvidia-smi --help-query-gpu` lists.
        visible: as for `list_visible_gpus`; others are left out.
    """
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", f"--query-gpu={','.join(('uuid', *fields))}", "--format=csv,noheader,nounits"]
    try:
        child = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ""
    lines = child.stdout.splitlines() if child.returncode == 0 else []
    return "\n".join(pick_visible_lines(lines, visible))


def find_gpus(*, visible: str | None = None) -> tuple[Gpu, ...]:
    """List NVIDIA GPUs by nvidia-smi, or by the driver's own files where that does not answer.

    Args:
        visible: as for `list_visible_gpus`; nvidia-smi leaves others out.
    """
    if text := query_nvidia_smi("name", "driver_version", "memory.total", visible=visible):
        return parse_nvidia_smi(text)
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
    """Read the memory of each visible GPU that no process holds now, in MiB; empty where the driver won't say."""
    return parse_gpu_memory(query_nvidia_smi("memory.used", "memory.total", visible=os.environ.get(VISIBLE)))


def read_gpu_capabilities() -> tuple[tuple[int, int], ...]:
    """Read the compute capability of each visible GPU, such as (9, 0); empty where the driver won't say."""
    rows = query_nvidia_smi("compute_cap", visible=os.environ.get(VISIBLE)).split()
    found = [re.fullmatch(r"(\d+)\.(\d+)", row) for row in rows]
    return tuple((int(match[1]), int(match[2])) for match in found if match)


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
    """Count the cores this process may use: its affinity mask, capped by the CPU quotas of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _list_cgroups("cpu"):
        both = _read_text(folder / "cpu.max").split()  # of v2; v1 has a file for each
        quota, period = both if len(both) == 2 else (_read_text(folder / f"cpu.cfs_{n}_us") for n in _CFS)
        if quota.strip().isdigit() and period.strip().isdigit():
            allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def _list_cgroups(controller: str) -> list[Path]:
    """Return the folders of this process's control groups, of v2 and v1, and of all above them: each may limit it.

    A container sees its own group as the topmost, and its path, where that is told from outside, leads nowhere.
    """
    found = [_CGROUPS, _CGROUPS / controller]
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            own = Path(path.lstrip("/"))
            top = _CGROUPS / controller if controllers else _CGROUPS
            found += [top / part for part in (own, *own.parents)]
    return list(dict.fromkeys(found))


def count_workers() -> int:
    """Return how many processes work here at once: one for each GPU this process may use, or for each core."""
    return min(MAX_WORKERS, len(list_own_gpus()) or count_cores())


def list_own_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    They are counted by their device files, as asking nvidia-smi takes longer than a stage that has nothing to do.
    """
    num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return list_visible_gpus(num_gpus, os.environ.get(VISIBLE))


def count_memory_mib() -> int:
    """Count the memory this process may use, in MiB: the machine's, capped by the limits of its control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _list_cgroups("memory"):
        for limit in ("memory.max", "memory.limit_in_bytes"):  # of v2, of v1
            text = _read_text(folder / limit).strip()
            total = min(total, int(text)) if text.isdigit() else total
    return total >> 20


def read_available_mib(total_mib: int, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that is free now in MiB, at most `total_mib`; all of it where the system won't say."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _read_text(meminfo), re.MULTILINE)
    return min(total_mib, int(match.group(1)) >> 10) if match else total_mib


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
