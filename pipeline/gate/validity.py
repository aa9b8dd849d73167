"""Is there any valid output at all? That is a fact about what came out, and no sample of chance.

A picture that is NaN, black or saturated all over is so whenever it is computed, and a detector that hits no object of
a whole evalset shows nothing. Answers that chance may turn, as one wrong tool call of one is, are not meant: those are
the sign-flip test's matter.
"""

from __future__ import annotations

from pipeline.gate.wording import definition_of

_MOST = 0.5  # of the reference's outputs that are valid: else the evalset, and not the candidate, is odd


def is_without_output(metric: str, bucket: str | None, reference: float, candidate: float) -> bool:
    """Say whether no output of a candidate is valid where most of the reference's are.

    Args:
        metric: "<eval>/<metric>".
        bucket: of its cases.
        reference: the reference's value.
        candidate: the candidate's.
    """
    definition = definition_of(metric)
    is_whole = definition.estimator == "average_precision" and definition.area == "all" and bucket is None
    if not definition.is_validity and not is_whole:
        return False
    ours, theirs = (x if definition.better == "higher" else 1 - x for x in (reference, candidate))
    return theirs == 0 and ours >= _MOST
