from mini_infer_operator.plan.rollout_throttle import START_PAUSE_S, RolloutThrottle


class Turns:
    def __init__(self, services: int, gpus: float = float("inf")) -> None:
        self.now = 0.0
        self.woken: list[str] = []
        self.throttle = RolloutThrottle[str](services, gpus, self.woken.append, lambda: self.now)


def test_so_many_at_a_time_and_the_next_is_woken() -> None:
    world = Turns(2)
    world.now = START_PAUSE_S
    assert [world.throttle.may_start(key, 0) for key in "abca"] == [True, True, False, True]
    world.throttle.release("a")
    assert world.woken == ["c"]
    assert world.throttle.may_start("c", 0)
    assert not world.throttle.may_start("d", 0)


def test_gpus_are_counted_and_one_service_always_may() -> None:
    world = Turns(10, gpus=4)
    world.now = START_PAUSE_S
    assert world.throttle.may_start("large", 8)
    assert not world.throttle.may_start("small", 1)
    world.throttle.release("large")
    assert [world.throttle.may_start(key, 2) for key in ("a", "b", "c")] == [True, True, False]


def test_after_a_start_those_that_roll_already_are_seen_first() -> None:
    world = Turns(1)
    assert not world.throttle.may_start("b", 0)
    assert world.throttle.look_again_s() == START_PAUSE_S
    world.throttle.occupy("a", 0)
    world.now = START_PAUSE_S
    assert not world.throttle.may_start("b", 0)
    world.throttle.release("a")
    assert world.throttle.may_start("b", 0)


def test_none_at_a_time_is_never() -> None:
    world = Turns(0)
    world.now = START_PAUSE_S
    assert not world.throttle.may_start("a", 0)


def test_a_waiting_key_that_is_gone_is_not_woken() -> None:
    world = Turns(1)
    world.now = START_PAUSE_S
    world.throttle.may_start("a", 0)
    world.throttle.may_start("b", 0)
    world.throttle.release("b")
    world.throttle.release("a")
    assert world.woken == []
