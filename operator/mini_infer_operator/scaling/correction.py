"""Corrects the model of work by the latencies that were observed. Pure."""

from mini_infer_operator.scaling.policy import Targets
from mini_infer_operator.scaling.signals import Sample

CORRECTION_UP, CORRECTION_DOWN, MOST_CORRECTION = 1.02, 0.995, 1.5
"""Factors on the work for each sample that missed a target though the model expected none, and for each that did not;
and the greatest one.
"""


def corrected(correction: float, role: str, sample: Sample, targets: Targets, *, is_calm: bool) -> float:
    """Returns the factor on the work. It grows while targets are missed although it `is_calm`: for a whole window there
    were as many engines as the model asked for, and nothing waits that came before them.
    """
    missed = (role != "decode" and sample.ttft_s is not None and sample.ttft_s > targets.ttft_s) or (
        role != "prefill" and sample.itl_s is not None and sample.itl_s > targets.itl_s
    )
    if missed and is_calm:
        return min(MOST_CORRECTION, correction * CORRECTION_UP)
    return max(1.0, correction * CORRECTION_DOWN)
