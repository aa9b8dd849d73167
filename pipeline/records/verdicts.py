"""What the gate makes of records: measured metrics, comparisons, speeds and the verdict on each candidate.

`compare` writes Verdicts; they are what `gate`, `track` and the reports read.
"""

from __future__ import annotations

from typing import Any, Literal

from pipeline.records.medians import GAIN_BELOW, MedianInterval
from pipeline.records.reasons import Reason
from pipeline.records.record_files import Record
from pipeline.records.speculation import SpeculationCounts

Outcome = Literal["pass", "fail", "inconclusive", "refused", "no gain"]  # of a candidate
# the tiers of the settings; what is watched has no tolerance of its own, and a fail of it alone counts
JudgedTier = Literal["critical", "supporting", "advisory", "watched"]
MIN_POWER = 0.8  # of a canary, to notice the rate that it is there for


class Metric(Record):
    """One number about one candidate, with how many cases it rests on."""

    name: str  # "<eval>/<metric>"
    bucket: str | None
    value: float
    unit: str
    better: Literal["higher", "lower"]
    n: int
    low: float | None = None  # 95 % interval
    high: float | None = None


class Comparison(Record):
    """One metric, in one bucket, of a candidate against the reference.

    `harm` and its bounds are positive when the candidate is worse, in the unit of `tolerance`:
    absolute for rates (0.03 = 3 points), relative for perplexity (0.02 = 2 %).
    """

    metric: str
    bucket: str | None
    reference: float
    candidate: float
    unit: str
    n: int
    num_clusters: int
    effective_clusters: float  # equal clusters that are worth as much; of rates: that could hide as large a loss
    design_effect: float = 1.0  # how much wider the harm is than it would be without clusters; of rates
    b: int | None = None  # reference right, candidate wrong
    c: int | None = None  # reference wrong, candidate right
    harm: float
    low: float  # one-sided 1 - alpha lower bound of the harm
    high: float  # one-sided 1 - alpha upper bound of the harm
    p: float | None = None
    p_holm: float | None = None
    tolerance: float | None  # None: reported, not gated
    tier: JudgedTier = "critical"  # what it means for the release
    outcome: Literal["pass", "fail", "inconclusive", "refused", "reported"]
    sentence: str


class DetectableLoss(Record):
    """The true loss of one gated comparison that stops the release with a probability of 50 % and of 80 %."""

    metric: str
    bucket: str | None
    k50: float  # on the scale of the tolerance
    k80: float


class Certificate(Record):
    """How good the rule is on a candidate's own records (`pipeline/gate/certificate.py`)."""

    num_swaps: int  # of the labels of both sides, within clusters
    num_false_fails: int  # swaps in which any comparison of its family fails
    block: int  # neighbouring clusters that were swapped together in a second round
    num_block_fails: int
    dependent: tuple[str, ...] = ()  # metrics in which neighbouring clusters move together
    losses: tuple[DetectableLoss, ...]
    num_passes: int | None = None  # swaps in which all of its family lets the release through: how often no loss passes
    weakest: str = ""  # the comparison that stops such a release most often
    num_weakest_passes: int | None = None


class CanaryFlip(Record):
    """One answer of the canary that another path changed; `token` is the first that differs, 0-based."""

    case_id: str
    token: int | None
    margin: float | None  # nat, of the baseline's token over the second most likely one
    reference: str
    candidate: str


class CanaryComparison(Record):
    """What the canary showed of one candidate; its kind of product says how it is judged."""

    baseline: str
    is_same_weights: bool  # on both sides: only then a difference is the path's
    num_prompts: int
    num_diverged: int
    kinds: dict[str, int]
    flips: tuple[CanaryFlip, ...]
    num_unstable: int  # prompts on which the candidate differs from itself, alone or again from loaded
    floor: int  # prompts on which the baseline differs from itself in that way
    allowed: int  # differences that the floor explains
    power: float  # chance that the target rate is noticed
    target_rate: float
    num_planned: int  # prompts that would notice it
    session_calls: int
    session_rate: float  # of sessions in which some answer changes
    session_rate_high: float
    num_tokens: int  # with a known margin
    num_tokens_at_risk: int
    num_prompts_at_risk: int
    risk_nats: float

    @property
    def is_changed(self) -> bool:
        """Some answer differs: from the baseline, or from run to run."""
        return self.num_diverged + self.num_unstable > 0

    @property
    def is_beyond_floor(self) -> bool:
        """More answers differ than the floor explains: for equal weights from the baseline, else from run to run."""
        return self.num_unstable > self.allowed or (self.is_same_weights and self.num_diverged > self.allowed)

    @property
    def is_blind(self) -> bool:
        """The path is judged, and the canary would most likely not notice the target rate."""
        return self.is_same_weights and self.power < MIN_POWER


class PairedMedians(Record):
    """One number of both sides, and of candidate / reference round by round."""

    reference: MedianInterval
    candidate: MedianInterval
    ratio: MedianInterval


class SpeedCell(Record):
    """One place of the benchmark's grid; the outcome is that of the throughput's ratio."""

    concurrency: int  # requests in flight
    prompt_tokens: tuple[int, int]
    throughput_tokens_per_s: PairedMedians
    ttft_ms: PairedMedians
    inter_token_latency_ms: PairedMedians
    outcome: Literal["faster", "slower", "no difference shown"]


class Gain(Record):
    """What a step that is there for speed alone gains: a memory format, compilation."""

    steps: tuple[str, ...]  # their kinds
    baseline: str  # the same candidate without them, or, where it is slower than that, without any step
    ratio: MedianInterval | None = None  # of the time to the baseline's; None: not told
    clock: str = ""  # "cpu", "device"
    why: str  # in words, for people

    @property
    def is_sure(self) -> bool:
        """Say whether it is faster beyond noise."""
        return self.ratio is not None and self.ratio.high < GAIN_BELOW


class Speed(Record):
    """How fast a candidate does the reference's work, over the grid."""

    cells: tuple[SpeedCell, ...]
    confidence: float  # of each interval
    reference_peak_memory_mib: float | None
    candidate_peak_memory_mib: float | None
    reference_gpu_memory_mib: float | None = None
    candidate_gpu_memory_mib: float | None = None


class Verdict(Record):
    """The judgement on one candidate."""

    candidate: str
    fingerprint: str
    facts: dict[str, Any] = {}  # about the endpoint that was evaluated; `fingerprint` is their digest
    behaviour: dict[str, str] = {}  # digest of each run of the canary: the behavioural fingerprint
    canary: CanaryComparison | None = None
    speculation: SpeculationCounts | None = None
    seconds: dict[str, float] = {}  # that each eval took
    outcome: Outcome
    is_release: bool
    reasons: tuple[Reason, ...]
    comparisons: tuple[Comparison, ...]
    metrics: tuple[Metric, ...]
    speed: Speed | None = None  # None: not in benchmark.candidates, or refused
    gain: Gain | None = None  # None: no step of it is there for speed alone
    total: MedianInterval | None = None  # of a network's time, to that of the reference run plainly; None: not told
    certificate: Certificate | None = None  # None: nothing of it could be measured
