"""Every ZMQ socket of engines and gateways has limits, from one table."""

import re
from pathlib import Path

import psutil
import pytest
import zmq

from mini_infer_process import zmq_limits
from mini_infer_process.zmq_limits import SocketLimits
from tests.support.checkout import PARTS

ROOT = Path(__file__).parents[2]
HUGE = 500_000_000


@pytest.mark.parametrize(
    ("limits", "kind", "sends"),
    [
        (zmq_limits.EVENTS, zmq.PUB, zmq.XSUB),
        (zmq_limits.REPLAY, zmq.ROUTER, zmq.DEALER),
        (zmq_limits.TRANSFER, zmq.ROUTER, zmq.DEALER),
        (zmq_limits.TRANSFER_CLIENT, zmq.DEALER, zmq.DEALER),
        (zmq_limits.WEIGHTS, zmq.ROUTER, zmq.DEALER),
        (zmq_limits.WEIGHTS_CLIENT, zmq.DEALER, zmq.DEALER),
        (zmq_limits.SUBSCRIBER, zmq.SUB, zmq.PUB),
        (zmq_limits.REPLAY_CLIENT, zmq.DEALER, zmq.DEALER),
    ],
    ids=lambda value: value.socket if isinstance(value, SocketLimits) else "",
)
def test_a_zmq_connection_ends_when_a_frame_is_huge(limits: SocketLimits, kind: int, sends: int) -> None:
    with zmq.Context() as context, zmq.Context() as elsewhere:
        socket = context.socket(kind)
        limits.apply(socket)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sender = elsewhere.socket(sends)
        sender.set(zmq.LINGER, 0)
        sender.set(zmq.RECONNECT_IVL, -1)
        monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sender.connect(f"tcp://127.0.0.1:{port}")
        assert monitor.poll(20_000)
        monitor.recv_multipart()
        if kind == zmq.SUB:  # a publisher sends only what was subscribed to
            socket.set(zmq.RCVTIMEO, 50)
            _first_message(socket, sender)
        frame = b"\x02" + bytes(HUGE)  # 0 and 1 would be subscriptions, which libzmq walks through byte by byte
        before = psutil.Process().memory_info().rss
        sender.send(frame, zmq.NOBLOCK, copy=False)
        assert monitor.poll(20_000), "the connection goes on"
        assert psutil.Process().memory_info().rss - before < HUGE / 5
        assert not socket.poll(50)
        sender.disable_monitor()
        monitor.close(0)
        sender.close(0)
        socket.close(0)


def _first_message(subscriber: "zmq.Socket[bytes]", publisher: "zmq.Socket[bytes]") -> None:
    for _ in range(400):
        publisher.send(b"first")
        try:
            subscriber.recv()
        except zmq.Again:
            continue
        while subscriber.poll(50):
            subscriber.recv()
        return
    pytest.fail("the subscription has not arrived")


def test_every_zmq_socket_applies_its_limits() -> None:
    made = re.compile(r"\.socket\(\s*(zmq\.[A-Z]+|kind)")
    without = []
    for part in PARTS:
        for file in (ROOT / part).rglob("*.py"):
            lines = file.read_text().splitlines()
            for number, line in enumerate(lines):
                if made.search(line) and not any(".apply(" in near for near in lines[number : number + 12]):
                    without.append(f"{file.relative_to(ROOT)}:{number + 1}: {line.strip()}")
    assert not without
