"""The fleet of prefill and decode engines: every request is answered, whatever switches, starts or stops meanwhile."""

from collections.abc import Mapping

import pytest

from benchmarks.autoscaling import TENTH
from benchmarks.fluid_roles import FixedSplit, PlannedSplit, ScaledPair
from benchmarks.scaling.loads import noise
from benchmarks.scaling.pair_fleet import PairFleet, Splitter
from mini_infer_operator.scaling.plan_state import DECODE, PREFILL, Fleet
from mini_infer_operator.scaling.signals import EngineRates, Sample

LOAD = [request for request in noise() if request.arrival_s < 60]


class Restless:
    """Switches an engine in every sample, and starts and stops others."""

    def __init__(self) -> None:
        self.samples = 0

    def split(self, sample: Sample, rates: EngineRates, fleets: Mapping[str, Fleet]) -> Mapping[str, int]:
        self.samples += 1
        return {PREFILL: 1 + self.samples % 2, DECODE: 2 - self.samples % 2 + (self.samples // 20) % 2}


@pytest.mark.parametrize("splitter", [FixedSplit(), PlannedSplit(TENTH), ScaledPair(TENTH, 0.95), Restless()])
def test_every_request_is_answered(splitter: Splitter) -> None:
    outcome = PairFleet(TENTH, splitter, 2, 2).run(LOAD)
    assert outcome.requests == len(LOAD)
    assert outcome.kept <= min(outcome.kept_ttft, outcome.kept_itl)
    assert outcome.kept_ttft > 0.9 * len(LOAD)
    assert (outcome.switches > 40) is isinstance(splitter, Restless)
    assert outcome.gpu_hours > 0
