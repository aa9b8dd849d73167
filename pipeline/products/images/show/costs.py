"""What each candidate of a product of images costs beside the reference: a table of time and memory of step and decode.

The decode is timed in turn with the reference's float32 decode of the same latents, so that its ratio stands whatever
else ran; a step's time is a sum over the run. Memory is counted where tensors are made and is the same each time.
"""

from __future__ import annotations

from pipeline.gate.compare import ReleaseComparison
from pipeline.products.images.findings.decoder import headroom, read_notes

_HEAD = (
    "candidate",
    "step, ms an image",
    "decode, ms an image",
    "decode to float32",
    "decode, MiB a batch",
    "to the reference",
    "PSNR to float32",
    "least headroom, doublings",
)

COSTS_LEGEND = """\
Time is CPU time on a CPU; the decode is timed in turn with the reference's float32 decode of the same latents, and its
ratio is the median over batches with its 95 % interval. A step costs what the reference's does where its latents were
taken (–). Memory is what the decode of a batch holds at most, weights included. Headroom is how many times the
decoder's largest activation can double in the format that it runs in."""


def tabulate_costs(compared: ReleaseComparison) -> list[list[str]]:
    """Return the rows of a Markdown table, the head first: a row for each evaluated candidate, by the first eval."""
    rows = [list(_HEAD), ["---"] + ["---:"] * (len(_HEAD) - 1)]
    reference = compared.findings[compared.judgement.policy.reference].evidence
    for name, findings in compared.findings.items():
        if findings.evidence is None or reference is None:
            continue
        if (eval_name := next(iter(findings.evidence.records), None)) is None or eval_name not in reference.records:
            continue  # refused: what it cost is not known either
        notes, base = read_notes(findings.evidence, eval_name), read_notes(reference, eval_name)
        ratio, least = notes["decode_to_float32"], min(map(headroom, notes["decoder"].values()), default=0.0)
        psnr = next((m.value for m in findings.metrics if m.name == f"{eval_name}/decode_psnr_db" and not m.bucket), 0)
        rows.append(
            [
                f"`{name}`",
                "–" if notes["step_ms_per_image"] is None else f"{notes['step_ms_per_image']:.2f}",
                f"{notes['decode_ms_per_image']:.2f}",
                f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else "–",
                f"{notes['decode_peak_mib']:.1f}",
                f"{notes['decode_peak_mib'] / base['decode_peak_mib']:.2f}",
                f"{psnr:.1f} dB",
                "overflow" if least == float("-inf") else f"{least:.1f}",
            ]
        )
    return rows
