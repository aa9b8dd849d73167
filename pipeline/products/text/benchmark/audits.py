"""Was the timed work the work that was asked for? In the spirit of MLPerf's audits, on every timed request.

The same number of completion tokens for all, prompts of the length that their cell says, and the answers that
were evaluated: a server that is fast because it answers something else is not fast. Token counts are the
server's usage, which an attached server could misstate: a text too short for its count is refused.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pipeline.errors import UnequalWorkError
from pipeline.products.text.benchmark.prompts import Plan, Prompt
from pipeline.products.text.benchmark.streaming import TimedReply
from pipeline.products.text.evals.calls import format_reply

GPU_QUERY_TIMEOUT_S = 30
_SHOWN = 60  # characters of an answer
# of a stream that is decoded as it comes; no hardware decodes 20,000 tokens/s for one user, one buffer sends them so
MIN_INTER_TOKEN_LATENCY_MS = 0.05


def check_work(timed: TimedReply, prompt: Prompt, plan: Plan, num_tokens: int) -> None:
    """Refuse an answer of another length than asked, or a prompt outside of its band."""
    reply = timed.reply
    if reply.num_completion_tokens != num_tokens:
        raise UnequalWorkError(
            f"{prompt.name}: expected {num_tokens} completion tokens, as every request decodes, got "
            f"{reply.num_completion_tokens}"
        )
    if not plan.band[0] <= reply.num_prompt_tokens <= plan.band[1]:
        raise UnequalWorkError(
            f"{prompt.name}: expected {plan.band[0]} to {plan.band[1]} prompt tokens, got {reply.num_prompt_tokens}"
        )


def check_stream(latencies_ms: Sequence[float], where: str) -> None:
    """Refuse answers whose tokens come all at once: nothing shows when the first of them was there.

    Single answers may come so where the client was kept waiting; half of them only where nothing streams.

    Args:
        latencies_ms: inter-token latency of each round.
        where: side and cell.
    """
    if (middle := statistics.median(latencies_ms)) < MIN_INTER_TOKEN_LATENCY_MS:
        raise UnequalWorkError(
            f"{where}: expected tokens one after the other, got all tokens of an answer at once "
            f"({middle:.4f} ms a token), so TTFT and inter-token latency can't be told; have the "
            "server, and what lies before it, stream, or raise benchmark.num_tokens where one draft "
            "holds an answer"
        )


def check_text(timed: TimedReply, expected: str, num_text_tokens: int, prompt: Prompt) -> None:
    """Refuse an answer that ends before the evaluated one and is too short for the tokens that the server says it has.

    Args:
        timed: an answer of a fixed number of tokens.
        expected: the evaluated first turn.
        num_text_tokens: of the answer's text. Another spelling of it may take fewer than were generated.
        prompt: that was asked.
    """
    claimed = timed.reply.num_completion_tokens
    if expected.startswith(timed.reply.text) and timed.reply.text != expected and num_text_tokens < claimed / 2:
        raise UnequalWorkError(
            f"{prompt.name}: expected a text of about {claimed} tokens, as the server says, got "
            f"{timed.reply.text[:_SHOWN]!r} with {num_text_tokens}"
        )


def is_evaluated_answer(timed: TimedReply, expected: str) -> bool:
    """Say whether a timed answer is the evaluated one, as far as both go.

    The timed one goes on where the model would have ended, or is cut before.

    Args:
        timed: an answer of a fixed number of tokens.
        expected: the evaluated first turn, in the words of `format_reply`.
    """
    answer = format_reply(timed.reply)
    return answer.startswith(expected) or expected.startswith(answer)


def format_change(timed: TimedReply, expected: str) -> str:
    """Say what was answered and what was evaluated."""
    return f"answered {format_reply(timed.reply)[:_SHOWN]!r}, evaluated was {expected[:_SHOWN]!r}"


def read_peak_memory_mib(pids: Iterable[int]) -> float | None:
    """Return the largest resident set since the start, in MiB, summed over processes and their descendants.

    A GPU's memory is not in it. None where the system does not show it, or when there are no processes.
    """
    try:
        peaks = [_read_peak_kib(pid) for root in pids for pid in _list_tree(root)]
    except OSError:
        return None
    return round(sum(peaks) / 1024, 1) if peaks else None


def read_gpu_memory_mib(pids: Iterable[int], *, query: Callable[[], str] | None = None) -> float | None:
    """Return the GPU memory that processes and their descendants hold now, in MiB, summed over all GPUs.

    An engine keeps what it once took, so that after the work it is the peak. None where nvidia-smi shows none of them.

    Args:
        pids: of the processes.
        query: returns lines "pid, MiB" of all processes that compute; nvidia-smi's if left out.
    """
    try:
        tree = {pid for root in pids for pid in _list_tree(root)}
    except OSError:
        return None
    rows = [line.split(",") for line in (query or _query_gpu_processes)().splitlines() if line.count(",") == 1]
    held = [int(size) for pid, size in rows if size.strip().isdigit() and int(pid) in tree]
    return float(sum(held)) if held else None


def _query_gpu_processes() -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GPU_QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _list_tree(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(below for child in children for below in _list_tree(child))]


def _read_peak_kib(pid: int) -> int:
    match = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(match.group(1)) if match else 0  # a process that has just ended holds nothing
