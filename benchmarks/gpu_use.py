"""How busy the GPUs of this process are and how much of their memory is in use, as nvidia-smi tells beside it."""

from __future__ import annotations

import shutil
import subprocess

from pipeline.running.environment import list_own_gpus


def start_nvidia_smi(interval_ms: int) -> subprocess.Popen[str] | None:
    """Start nvidia-smi, which prints percent of busy time and MiB in use of each GPU; None where there is none.

    Args:
        interval_ms: between two lines of a GPU. GPUs that CUDA_VISIBLE_DEVICES leaves out have none.
    """
    gpus = list_own_gpus()
    if not gpus or not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    if not gpus[0].startswith("MIG-"):  # of a slice nvidia-smi tells no use: its card's is the nearest
        query.append(f"--id={','.join(gpus)}")
    return subprocess.Popen([*query, "-lms", str(interval_ms)], stdout=subprocess.PIPE, text=True)


def parse_use(line: str) -> tuple[float, float] | None:
    """Return percent of busy time and MiB in use of a line; None where it is cut, or a card does not say."""
    cells = [cell.strip() for cell in line.split(",")]
    return (float(cells[0]), float(cells[1])) if len(cells) == 2 and all(map(str.isdigit, cells)) else None
