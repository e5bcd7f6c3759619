"""When an endpoint is given more, as a table; and how the window is learned."""

import pytest

from mini_infer_gateway.fleet.load import Load
from mini_infer_gateway.flow_control.capacity import (
    FIRST_WINDOW_S,
    LONGEST_WINDOW_S,
    SHORTEST_WINDOW_S,
    Window,
    has_capacity,
)


@pytest.mark.parametrize(
    ("load", "has_space"),
    [
        pytest.param(Load(0, 0, 0, 0.0), True, id="idle"),
        pytest.param(Load(9, 0, 3_999, 0.5), True, id="less than the window"),
        pytest.param(Load(9, 0, 4_000, 0.5), False, id="the window is full"),
        pytest.param(Load(9, 1, 0, 0.99), True, id="one waits for pages"),
        pytest.param(Load(9, 2, 0, 0.99), False, id="two wait for pages"),
        pytest.param(Load(9, 3, 0, 0.99, engines=2), True, id="three wait for pages of two engines"),
        pytest.param(Load(9, 4, 0, 0.99, engines=2), False, id="four wait for pages of two engines"),
        pytest.param(Load(9, 0, 0, 0.99, unreported=2), False, id="no pages for those on their way"),
        pytest.param(Load(9, 1, 0, 0.5, unreported=1), False, id="one more joins the one that waits"),
        pytest.param(Load(9, 0, 0, 0.5, unreported=9), True, id="many on their way, and room for them"),
        pytest.param(Load(99, 0, 99_999, 0.0, reported=False), True, id="nobody could say when it has room again"),
    ],
)
def test_endpoint_has_capacity_by_its_load_and_window(load: Load, has_space: bool) -> None:
    assert has_capacity(load, tokens_per_s=10_000.0, window_s=0.4) is has_space


def test_the_window_grows_when_an_endpoint_runs_dry_and_shrinks_when_it_does_not() -> None:
    window = Window()
    window.learn(queued_tokens=0, waiting_here=0)
    assert window.seconds == FIRST_WINDOW_S  # idle, and nothing for it to do
    window.learn(queued_tokens=0, waiting_here=3)
    assert window.seconds > FIRST_WINDOW_S
    for _ in range(50):
        window.learn(queued_tokens=0, waiting_here=3)
    assert window.seconds == LONGEST_WINDOW_S
    for _ in range(2_000):
        window.learn(queued_tokens=9, waiting_here=3)
    assert window.seconds == SHORTEST_WINDOW_S
