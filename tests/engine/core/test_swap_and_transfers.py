"""Pages of a preempted sequence that are still to be copied to main memory, and others that want them at once."""

import random

import pytest

from mini_infer_engine.core.request import Output
from mini_infer_engine.kv_transfer.protocol import events
from tests.support.connected_engine import FROM_PEER, connect, request
from tests.support.engine_world import make_engine
from tests.support.fake_runner import FakeRunner, expected_tokens

PAGE = 16


class FastPeer:
    """Writes to the pages that it is to fill as soon as it is asked, beside passes that are planned or in flight."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.takes: list[events.Take] = []

    def fill(self, take: events.Take) -> None:
        self.takes.append(take)
        runner, pages = self._runner, set(take.pages)
        for page in pages:
            runner._cells[page] = [None] * PAGE
        for swap in [swap for handle in runner._in_flight for swap in handle.swap_out]:
            if swap.device_page in pages:  # a device that is still at an earlier pass copies what is there by then
                runner._host_cells[swap.host_page] = [None] * PAGE


@pytest.mark.parametrize("step_depth", [0, 1])
def test_no_page_is_received_into_while_its_contents_are_to_be_copied_out(step_depth: int) -> None:
    engine, runner = make_engine(
        *(8, PAGE, 112), num_host_pages=40, step_depth=step_depth, max_num_seqs=8, draw=random.Random(1)
    )
    worker, _ = connect(engine)
    peer = FastPeer(runner)
    worker.on_take = peer.fill
    first, second = (request(name, 33, 60) for name in ("a", "b"))
    made: dict[str, list[int]] = {"a": [], "b": []}
    swaps = 0

    def take(outputs: list[Output]) -> None:
        for output in outputs:
            assert not output.error, output.error
            made.setdefault(output.request_id, []).extend(output.token_ids)

    engine.add(first)
    engine.add(second)
    for number in range(400):
        if number == 20:  # it goes before both, and waits until one of them is preempted
            engine.add(request("c", 17, 2, kv_source=FROM_PEER, priority=-1))
        take(engine.step())
        swaps = engine.scheduler.kv_cache.num_swaps
        for job in [one for one in worker.done if isinstance(one, events.Take)]:
            worker.send_news(events.TransferFailed(job.job, "late", "no"), events.Settled(job.job))
        worker.done.clear()
        if not engine.has_work:
            break
    assert swaps > 0
    assert peer.takes, "the third sequence was to be received"
    assert made["a"] == expected_tokens(first, 112)
    assert made["b"] == expected_tokens(second, 112)
