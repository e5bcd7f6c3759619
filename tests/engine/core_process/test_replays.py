"""Replays cost the core a bounded amount a turn, whatever peers send and however many there are."""

from collections.abc import Iterator

import pytest
import zmq

from mini_infer_contract import events
from mini_infer_engine.core_process import replays
from mini_infer_engine.core_process.replays import EventRing, ReplayServer
from mini_infer_process import zmq_limits
from tests.engine.server.dry_server import wait_until

BATCH = b"x" * 10_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class World:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context, self.clock, self.ring = context, Clock(), EventRing()
        socket = context.socket(zmq.ROUTER)
        zmq_limits.REPLAY.apply(socket)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        self.socket = socket
        self.server = ReplayServer(socket, self.ring, self.clock)
        for sequence in range(500):
            self.ring.append(sequence, BATCH)

    def peer(self) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{self.port}")
        return dealer

    def serve(self, seconds: float = 0.02) -> None:
        self.clock.now_s += seconds
        self.server.serve()


def read(peer: zmq.Socket[bytes]) -> list[tuple[int, bytes] | None]:
    came = []
    while peer.poll(1):
        came.append(events.read_replay_reply(peer.recv_multipart()))
    return came


@pytest.fixture
def world() -> Iterator[World]:
    context = zmq.Context()
    yield World(context)
    context.destroy(linger=0)


def test_a_turn_sends_a_bounded_slice_when_many_peers_ask_for_everything(world: World) -> None:
    peers = [world.peer() for _ in range(4)]
    for peer in peers:
        for _ in range(50):
            peer.send_multipart([b"", events.sequence_frame(0)])
    most, sent = 0, 0
    total = [0] * len(peers)

    def all_ended() -> bool:
        nonlocal most, sent
        before = sum(total)
        world.serve()
        for number, peer in enumerate(peers):
            for reply in read(peer):
                total[number] += 0 if reply is None else 1
        most = max(most, (sum(total) - before) * len(BATCH))
        sent += 1
        return min(total) >= 500

    wait_until(all_ended)
    assert sent * replays.BURST_BYTES >= 4 * 500 * len(BATCH) * 0.9  # the bytes were spread over so many turns
    assert world.server.dropped > 0  # peers that ask again meanwhile are sent one replay at a time


def test_requests_beyond_the_bounded_number_of_replays_are_dropped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    peers = [world.peer() for _ in range(replays.MAX_REPLAYS + 4)]
    for peer in peers:
        peer.send_multipart([b"", events.sequence_frame(0)])

    def all_read() -> bool:
        world.serve(0.0002)
        return world.server.dropped == 4

    wait_until(all_read)
    assert len([record for record in caplog.records if "is dropped" in record.message]) == 1


def test_a_peer_that_reads_nothing_costs_a_bounded_queue_and_loses_its_replay(world: World) -> None:
    lazy, honest = world.peer(), world.peer()
    lazy.set(zmq.RCVHWM, 1)
    for sequence in range(500, 5_000):
        world.ring.append(sequence, BATCH)
    lazy.send_multipart([b"", events.sequence_frame(0)])
    wait_until(lambda: (world.serve(0.001), world.server.is_busy)[1])
    honest.send_multipart([b"", events.sequence_frame(4_990)])
    came: list[tuple[int, bytes] | None] = []

    def honest_has_all() -> bool:
        world.serve(0.001)
        came.extend(read(honest))
        return len(came) == 11

    wait_until(honest_has_all)
    assert came[-1] is None
    world.server.serve()
    assert world.server.is_busy
    for _ in range(3):
        world.serve(replays.STALL_S)
    wait_until(lambda: (world.serve(replays.STALL_S), not world.server.is_busy)[1])


def test_a_peer_that_is_gone_loses_its_replay(world: World) -> None:
    peer = world.peer()
    peer.send_multipart([b"", events.sequence_frame(0)])
    wait_until(lambda: (world.serve(0.0001), world.server.is_busy)[1])
    peer.close(linger=0)
    wait_until(lambda: (world.serve(), not world.server.is_busy)[1])


@pytest.mark.parametrize("frames", [[b""], [b"", b"1234567"], [b"x" * 3_000], [b"", b"\xff" * 8], [b"a"] * 200])
def test_a_peer_s_fault_costs_the_peer_alone(world: World, frames: list[bytes]) -> None:
    hostile, honest = world.peer(), world.peer()
    hostile.send_multipart(frames)
    honest.send_multipart([b"", events.sequence_frame(499)])
    came: list[tuple[int, bytes] | None] = []

    def both() -> bool:
        world.serve()
        came.extend(read(honest))
        return len(came) == 2

    wait_until(both)
    assert came == [(499, BATCH), None]


def test_the_server_says_when_to_serve_again(world: World) -> None:
    assert world.server.wait_s() == float("inf")
    assert world.server.is_open()
    peer = world.peer()
    peer.send_multipart([b"", events.sequence_frame(0)])
    wait_until(lambda: (world.server.serve(), world.server.is_busy)[1])
    for _ in range(200):
        world.server.serve()
        read(peer)
    assert not world.server.is_open()  # the clock stands still: nothing is refilled
    assert 0 < world.server.wait_s() < 0.1


def test_a_ring_starts_at_what_it_still_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "RING_BATCHES", 10)
    ring = EventRing()
    assert ring.next_from(0) is None
    for sequence in range(25):
        ring.append(sequence, b"%d" % sequence)
    assert ring.next_from(0) == (15, b"15")
    assert ring.next_from(20) == (20, b"20")
    assert ring.next_from(25) is None
    assert ring.next_from(2**64 - 1) is None
