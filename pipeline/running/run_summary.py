"""What a run did, in a few lines: what ran and how long, what was reused, what failed, minutes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.running.progress import format_duration
from pipeline.running.run_state import Phase, Step


def format_summary(phases: Sequence[Phase], seconds: float, cpu_s: float) -> Iterator[str]:
    """Yield the lines.

    Args:
        phases: of the run.
        seconds: that it took.
        cpu_s: CPU time of all its processes, in seconds.
    """
    if ran := [row for phase in phases for row in _list_owners(phase)]:
        yield "what ran, in seconds (of CPU time):"
        if len(ran) > 1:
            ran.append(("in all", list(_sum_stages([step for _, steps in ran for step in steps]))))
        width = max(len(owner) for owner, _ in ran)
        yield from (f"  {owner:{width}}  {', '.join(map(_format_step, steps))}" for owner, steps in ran)
    if reused := [text for phase in phases for text in _list_reused(phase)]:
        yield f"reused: {'; '.join(reused)}"
    ends = {step.name: step.outcome for phase in phases for step in phase.steps.values()}  # the last, if tried again
    if failed := [name for name, outcome in ends.items() if outcome == "failed"]:
        yield f"failed: {', '.join(failed)}"
    yield f"took {_format_time(seconds)}, and {_format_time(cpu_s)} of CPU time"


def _format_time(seconds: float) -> str:
    """Return a time as `format_duration` does; below ten minutes with seconds, as a minute is over a tenth there."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if 100 <= whole < 600 else format_duration(whole)


def _list_owners(phase: Phase) -> Iterator[tuple[str, list[Step]]]:
    """Yield each candidate or product that had work done, and its steps."""
    steps: dict[str, list[Step]] = {}
    for step in phase.steps.values():
        if not step.is_taken:
            steps.setdefault(step.owner or "project", []).append(step)
    yield from steps.items()


def _sum_stages(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield one step for each stage, with the times of all its steps; some ran side by side."""
    for stage in dict.fromkeys(step.stage for step in steps):
        own = [step for step in steps if step.stage == stage]
        seconds, cpu_s = sum(step.seconds or 0.0 for step in own), sum(step.cpu_s for step in own)
        yield Step(stage, number=0, start=0.0, seconds=seconds, cpu_s=cpu_s)


def _format_step(step: Step) -> str:
    cpu = f" ({step.cpu_s:,.1f})" if step.cpu_s else ""
    kept = f" with {step.num_kept:,} of {step.num_counted:,} kept" if step.num_kept else ""
    return f"{step.stage} {step.seconds or 0.0:,.1f}{cpu}{kept}"


def _list_reused(phase: Phase) -> Iterator[str]:
    yield from phase.reused
    if num_taken := sum(step.is_taken for step in phase.steps.values()):
        made = "results made ahead" if phase.is_serial else "results of an earlier prefetch"
        yield f"{num_taken} {made}"
    units: dict[str, int] = {}
    for step in phase.steps.values():
        for piece in step.pieces.values():
            units[piece.fact.unit] = units.get(piece.fact.unit, 0) + piece.fact.kept
    for unit, num in units.items():
        if num:
            yield f"{num:,} {unit} that were finished before"
