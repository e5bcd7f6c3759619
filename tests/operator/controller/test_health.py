from mini_infer_operator.controller.health import DEAF_AFTER_S, WatchHealth


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_quiet_cluster_is_healthy() -> None:
    clock = Clock()
    health = WatchHealth(clock)
    assert not health.ready
    health.listed({})
    clock.now = 1e6
    assert health.ready
    assert health.alive()


def test_a_change_that_the_watch_does_not_deliver_is_deafness() -> None:
    clock = Clock()
    health = WatchHealth(clock)
    health.saw("a", "1")
    assert health.listed({"a": "1"}) == []
    assert health.listed({"a": "2"}) == ["a"]
    clock.now = DEAF_AFTER_S - 1
    assert health.listed({"a": "3"}) == ["a"]  # it changes on: deaf since the first missed change
    assert health.alive()
    clock.now = DEAF_AFTER_S + 1
    assert not health.alive()
    health.saw("a", "3")
    assert health.alive()


def test_what_is_gone_is_forgotten() -> None:
    clock = Clock()
    health = WatchHealth(clock)
    health.listed({"a": "1"})
    health.listed({})
    clock.now = 1e6
    assert health.alive()
