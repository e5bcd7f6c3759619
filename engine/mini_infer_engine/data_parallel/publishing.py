"""Publishes events and load of a server's engines at one endpoint, as one engine. Owns the sockets, decides nothing."""

import asyncio
import math
import time

import zmq

from mini_infer_contract import events
from mini_infer_contract.events import LoadReport
from mini_infer_engine.config.peer_ports import PeerPorts
from mini_infer_engine.core_process.publisher import EventPublisher
from mini_infer_engine.data_parallel.load import total_load
from mini_infer_engine.data_parallel.router import EngineRouter
from mini_infer_process.curve import PeerAuthenticator

_SLICE_S = 0.002
"""Seconds between two slices of replays, in which requests are served."""


class UnitedPublisher:
    """Publishes the messages of all engines for gateways, and updates the router's record of their caches."""

    def __init__(self, router: EngineRouter, peers: PeerPorts, events_port: int, replay_port: int) -> None:
        """Opens the sockets. Raises PortInUseError if a port is taken."""
        self._context = zmq.Context()
        self._router = router
        self._publisher = EventPublisher(self._context, peers.host, events_port, replay_port, secret=peers.secret)
        self._authenticator = PeerAuthenticator(self._context, peers.secret) if peers.secret is not None else None
        self._next_slice: asyncio.TimerHandle | None = None
        self._loads: dict[int, LoadReport] = {}
        self._accepted: list[str] = []
        self._postponed: asyncio.TimerHandle | None = None

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last batch of KV events."""
        return self._publisher.last_sequence

    def answer_replays(self) -> None:
        """Answers replay requests from now on, in the running event loop."""
        if self._publisher.replay is not None:
            asyncio.get_running_loop().add_reader(self._publisher.replay.FD, self._answer)
            self._answer()  # the descriptor wakes for what comes, not for what is there

    def _answer(self) -> None:
        """Sends one slice, and schedules the next: the descriptor does not wake again for requests left
        in the socket.
        """
        if self._next_slice is not None:
            return
        self._publisher.answer_replays()
        wait_s = 0.0 if self._publisher.has_replay_requests() else self._publisher.replay_wait_s()
        if wait_s < math.inf:
            self._next_slice = asyncio.get_running_loop().call_later(max(wait_s, _SLICE_S), self._answer_next)

    def _answer_next(self) -> None:
        self._next_slice = None
        self._answer()

    def take(self, engine: int, topic: bytes, payload: bytes) -> None:
        """Publishes a message of an engine."""
        if topic == events.EVENTS_TOPIC:
            merged = self._router.apply(engine, events.decode_batch(payload).events)
            self._publisher.publish_events(merged, time.time())
        elif topic == events.LOAD_TOPIC:
            report = events.decode_load(payload)
            self._loads[engine] = report
            self._accepted += report.accepted
            self._publish_load(report.role)

    def remove_engine(self, engine: int) -> None:
        """Removes the load of an engine that has ended."""
        self._loads.pop(engine, None)

    def _publish_load(self, role: str) -> None:
        """Publishes the total load now, or as soon as the publisher's interval allows it."""
        now = time.time()
        if self._postponed is not None or not self._loads:
            return
        if not self._publisher.load_is_due(now):
            wait_s = self._publisher.load_wait_s(now)
            self._postponed = asyncio.get_running_loop().call_later(wait_s, self._publish_later, role)
            return
        accepted, self._accepted = self._accepted, []
        self._publisher.publish_load(total_load(list(self._loads.values()), accepted, role), now)

    def _publish_later(self, role: str) -> None:
        self._postponed = None
        self._publish_load(role)

    def close(self) -> None:
        """Closes the sockets."""
        if self._postponed is not None:
            self._postponed.cancel()
        if self._next_slice is not None:
            self._next_slice.cancel()
        if self._publisher.replay is not None:
            asyncio.get_running_loop().remove_reader(self._publisher.replay.FD)
        self._publisher.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.destroy(linger=0)
