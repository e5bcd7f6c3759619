"""The backlog against a plain list of what waits."""

from hypothesis import given
from hypothesis import strategies as st

from mini_infer_gateway.fleet.backlog import Backlog, Entry

PRIORITIES, ENDPOINTS, POOLS = st.integers(-1, 1), st.sampled_from("abc"), st.sampled_from("xy")


@given(st.lists(st.tuples(PRIORITIES, ENDPOINTS, POOLS, st.integers(1, 99), st.booleans()), max_size=40))
def test_backlog_counts_equal_those_of_a_plain_list(steps: list[tuple[int, str, str, int, bool]]) -> None:
    backlog, waiting = Backlog(), []
    for number, (priority, endpoint, pool, tokens, leaves) in enumerate(steps):
        if leaves and waiting:
            backlog.remove(waiting.pop(number % len(waiting)))
        entry = Entry((priority, 0.0, number), pool)
        backlog.add(entry, endpoint, tokens)
        waiting.append(entry)
    for endpoint in "abc":
        own = sorted((entry for entry in waiting if entry.endpoint == endpoint), key=lambda entry: entry.order)
        assert backlog.waiting(endpoint) == own
        for order in [(-2, 0.0, 0), (0, 0.0, 3), (2, 0.0, 0)]:
            ahead = [entry for entry in own if entry.order < order]
            assert backlog.ahead(endpoint, order) == (len(ahead), sum(entry.uncached_tokens for entry in ahead))
    for pool in "xy":
        of_pool = [entry for entry in waiting if entry.pool == pool]
        assert backlog.depth(pool) == backlog.depths().get(pool, 0) == len(of_pool)
        assert backlog.last(pool) is max(of_pool, key=lambda entry: entry.order, default=None)
    for entry in waiting:
        backlog.remove(entry)
        assert entry.endpoint == ""
    assert backlog.endpoints() == []
    assert backlog.depths() == {}
