"""Who counts as hung, with short ticks: a rank that says nothing, sooner once the model is loaded."""

import time
import uuid
from collections.abc import Iterator

import pytest
import zmq

from mini_infer_engine.distributed import heartbeats as signs
from mini_infer_engine.server.serve import _DEAD_CORE_LINGER_S
from tests.engine.server.dry_server import wait_until

TICK_S = 0.01


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[zmq.Socket[bytes]]:
    monkeypatch.setattr(signs, "TICK_S", TICK_S)
    monkeypatch.setattr(signs, "LOADING_TICKS", 10**6)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"inproc://{uuid.uuid4().hex}")  # a name is free again only some time after its socket was closed
        yield router


def test_more_than_a_second_of_five_is_left_when_a_hung_rank_is_noticed() -> None:
    """The group of a lost rank ends within five seconds, as parallelism.md says; tests of processes wait for its end
    however long a busy machine takes for it.
    """
    assert signs.SILENT_TICKS * signs.TICK_S + _DEAD_CORE_LINGER_S < 4


def test_a_rank_is_lost_when_its_heartbeats_stop_after_loading(router: zmq.Socket[bytes]) -> None:
    lost: list[str] = []
    watch = signs.Watch(router, range(1, 2), dict, lost.append, "group")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as rank:
        rank.set(zmq.IDENTITY, b"1")
        rank.connect(router.last_endpoint)
        rank.send(signs._encode(signs.Alive()))
        rank.recv()  # it was heard
        time.sleep(3 * signs.SILENT_TICKS * TICK_S)
        assert not lost
        watch.loaded()
        wait_until(lambda: bool(lost))
        assert "rank 1 of the group hangs" in lost[0]
    watch.close()


def test_a_rank_ends_when_the_first_ones_heartbeats_stop_after_loading(router: zmq.Socket[bytes]) -> None:
    lost: list[str] = []
    spoken = signs.HeartbeatSender("ipc:///nowhere", 1, lost.append)
    time.sleep(3 * signs.SILENT_TICKS * TICK_S)
    assert not lost
    spoken.loaded()
    wait_until(lambda: bool(lost))
