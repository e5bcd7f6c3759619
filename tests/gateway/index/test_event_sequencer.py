"""Verdicts on sequence numbers."""

import pytest

from mini_infer_gateway.index.event_sequencer import Sequencer, Verdict

N, K, G, R = Verdict.NEXT, Verdict.ALREADY_APPLIED, Verdict.GAP, Verdict.RESTARTED


@pytest.mark.parametrize(
    ("applied", "received", "verdicts"),
    [
        (None, [5, 6, 7], [N, N, N]),
        (-1, [0, 1], [N, N]),
        (4, [3, 4, 5], [K, K, N]),
        (4, [7], [G]),
        (4, [5, 6, 0], [N, N, R]),
        (4, [5, 5], [N, R]),
        (None, [9, 3, 4], [N, R, N]),
    ],
)
def test_verdicts(applied: int | None, received: list[int], verdicts: list[Verdict]) -> None:
    sequencer = Sequencer()
    if applied is not None:
        sequencer.applied(applied)
    seen = []
    for sequence in received:
        seen.append(sequencer.observe(sequence))
        if seen[-1] is not K:
            sequencer.applied(sequence)
    assert seen == verdicts
