"""Did a server know the prompts before they were timed? Judged from its probes, by the benchmark and by the gate.

The evals and the canary have asked the timed prompts. A server that was not started since may answer them from
its prefix cache: quickly, and not as it would answer a user. So prompts like the timed ones are asked in turn
with copies that nobody can have asked. A server knew them when the interval of `medians` around the ratio of
TTFT is below 0.9: where nothing is known, 15 of 20 ratios fall below 1 in 2 % of bands, and below 0.9 in fewer.

Not covered: a server that knows less than half of the prompts, whose median ratio stays at 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.records.benchmarks import Probe
from pipeline.records.medians import MedianInterval, bound_median

NUM_PROBES = 20  # of a band: the sixth smallest to the sixth largest ratio cover the median with 95.9 %
# What many prompts share is cached for both, and lengths agree to a few tokens: of fresh embedded servers the medians
# were 0.72 to 1.15 and the upper bounds 1.04 or more, of those asked before 0.64 to 0.71 at 40 to 90 prompt tokens.
LEAST_RATIO = 0.9


def bound_known_ttft(probes: Sequence[Probe], band: tuple[int, int]) -> MedianInterval:
    """Return the TTFT of known prompts of a band relative to fresh ones, pair by pair.

    Raises:
        EvidenceError: fewer than six probes.
    """
    return bound_median([p.known_ttft_ms / p.fresh_ttft_ms for p in probes if p.prompt_tokens == band])


def find_prefix_cache_hits(
    probes: Sequence[Probe], bands: Sequence[tuple[int, int]], *, role: str, name: str
) -> str | None:
    """Say in which band a server surely knew the prompts, or is not shown not to; None: in none.

    Args:
        probes: of one server.
        bands: of the grid, in prompt tokens.
        role: of the server, "reference" or "candidate".
        name: of the candidate whose benchmark it is.
    """
    for band in bands:
        where = f"{role}, {band[0]} to {band[1]} prompt tokens"
        if (found := sum(probe.prompt_tokens == band for probe in probes)) != NUM_PROBES:
            return (
                f"{where}: expected {NUM_PROBES} probes of whether the server knew the prompts, got {found}; run "
                "`dvc repro`"
            )
        ratio = bound_known_ttft(probes, band)
        if ratio.high < LEAST_RATIO:
            return (
                f"{where}: the server knew the timed prompts, which take {ratio.median:.2f} ({ratio.low:.2f} to "
                f"{ratio.high:.2f}) of the TTFT of prompts that nobody had asked, expected {LEAST_RATIO:g} or "
                "more; turn its prefix cache off, or restart it after the evals, then run "
                f"`dvc repro -f -s benchmark@{name}`"
            )
    return None
