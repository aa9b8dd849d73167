"""How busy the GPUs of this process are and how much of their memory is in use, as nvidia-smi tells beside it."""

from __future__ import annotations

import os
import shutil
import subprocess


def start_nvidia_smi(interval_ms: int) -> subprocess.Popen[str] | None:
    """Start nvidia-smi, which prints percent of busy time and MiB in use of each GPU; None where it is absent.

    Args:
        interval_ms: between two lines of a GPU. GPUs that CUDA_VISIBLE_DEVICES leaves out have none.
    """
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query.append(f"--id={visible}")
    return subprocess.Popen([*query, "-lms", str(interval_ms)], stdout=subprocess.PIPE, text=True)
