"""The rest of a start is done while nothing else is, and seldom while requests are served."""

from mini_infer_engine.core_process.warm_up import INTERVAL_S, WarmUp


class Parts:
    """A number of parts, one for each call."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self) -> bool:
        self.left = max(0, self.left - 1)
        return self.left > 0


def test_parts_follow_one_another_when_the_engine_is_idle() -> None:
    parts = Parts(3)
    warm_up = WarmUp(parts)
    for _ in range(3):
        assert not warm_up.is_over
        warm_up.run(0.0, is_idle=True)
    assert warm_up.is_over


def test_parts_are_an_interval_apart_when_requests_are_served() -> None:
    parts = Parts(10)
    warm_up = WarmUp(parts)
    for step in range(100):  # a pass every hundredth of two intervals
        warm_up.run(step * INTERVAL_S / 50, is_idle=False)
    assert parts.left == 10 - 2


def test_nothing_runs_when_nothing_is_left() -> None:
    calls = []
    warm_up = WarmUp(lambda: bool(calls.append(1)))
    for step in range(3):
        warm_up.run(100.0 * step, is_idle=True)
    assert len(calls) == 1
