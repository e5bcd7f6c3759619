"""A member of the service gone wrong: it sits between a decode and a prefill engine and changes their messages.

Valid conversations of KV transfer pass through it; in every few messages one value is another, or a message is lost,
doubled or replaced. Both engines have to bear it, and answer their own clients.
"""

import asyncio
from itertools import count, islice
from random import Random
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mini_infer_contract.launch import FETCH_FROM_HEADER, PREFILL_FROM_HEADER
from mini_infer_contract.peer_auth import PEER_HEADER
from mini_infer_process.curve import PeerAuthenticator, secure_client, secure_server
from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings, post
from tests.fuzz.mutation import mutated, mutated_bytes


class Tamperer:
    """Forwards messages between DEALERs that connect to it and one ROUTER of an engine."""

    def __init__(self, fleet: Fleet, random: Random, found: Findings) -> None:
        self._fleet, self._random, self._found = fleet, random, found
        self._context = zmq.asyncio.Context()
        self._authenticator = PeerAuthenticator(zmq.Context(self._context), fleet.secret)
        self._router = self._context.socket(zmq.ROUTER)
        secure_server(self._router, fleet.secret)
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._back: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Forwards until cancelled."""
        try:
            while True:
                sender, *frames = await self._router.recv_multipart()
                back = self._back.get(sender)
                if back is None:
                    back = self._back[sender] = self._context.socket(zmq.DEALER)
                    back.set(zmq.LINGER, 0)
                    secure_client(back, self._fleet.secret)
                    back.connect(self._fleet.transfer_addresses[0])
                    task = asyncio.create_task(self._answers(sender, back))
                    self._tasks.add(task)
                for changed in self._changed(frames):
                    await back.send_multipart(changed)
        finally:
            for task in self._tasks:
                task.cancel()
            self._authenticator.close()
            self._context.destroy(linger=0)

    async def _answers(self, sender: bytes, back: zmq.asyncio.Socket) -> None:
        while True:
            frames = await back.recv_multipart()
            for changed in self._changed(frames):
                await self._router.send_multipart([sender, *changed])

    def _changed(self, frames: list[bytes]) -> list[list[bytes]]:
        """Returns what is sent in place of a message: most often itself."""
        draw = self._random.random()
        message = _decoded(frames[-1])
        if draw < 0.8 or not isinstance(message, dict):
            return [frames]
        self._found.count("transfers", "changed")
        if draw < 0.83:
            return []
        if draw < 0.86:
            return [frames, frames]
        try:
            wire = mutated_bytes(self._random, frames[-1])
            if draw >= 0.9:
                wire = msgspec.msgpack.encode(mutated(self._random, message))
        except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeError):
            return [frames]
        redirects = isinstance(changed := _decoded(wire), dict) and _writes(changed) != _writes(message)
        return [frames if redirects else [*frames[:-1], wire]]


_WRITES = ("job", "jobs", "serial", "slot", "pages")
"""Fields that say where an engine writes, and which job's writes have ended. Members of a service are trusted with each
other's pools (docs/security.md): one that lies here can make other texts wrong, and no engine can tell. It may end
none.
"""


def _writes(message: dict[str, Any]) -> list[Any]:
    """Returns what a message says of writes; of a greeting, that is the pool and its layout."""
    fields = [message.get(name) for name in _WRITES]
    party = message.get("party")
    return [*fields, party.get("layout"), party.get("where")] if isinstance(party, dict) else [*fields, party]


REQUESTS_EACH = 25
"""Requests that name one tamperer. An engine stops to talk to a peer that lies, so another takes its place then."""


def _decoded(frame: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return None


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Asks the decode engine for prompts that come by way of one tamperer after the other."""
    numbers = count()
    while True:
        tamperer = Tamperer(fleet, random, found)
        running = asyncio.create_task(tamperer.run())
        try:
            for number in islice(numbers, REQUESTS_EACH):
                await _one(fleet, random, found, number, tamperer.address)
                await fleet.pause(random, 0.2)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _one(fleet: Fleet, random: Random, found: Findings, number: int, address: str) -> None:
    header = PREFILL_FROM_HEADER if random.random() < 0.8 else FETCH_FROM_HEADER
    body = {
        "model": fleet.models[1],
        "prompt": f"{number}: " + "What does textwrap.dedent do? " * random.choice((1, 5, 40)),
        "max_tokens": random.choice((1, 8)),
    }
    headers = {header: address, PEER_HEADER: fleet.secret.http_token()}
    give_up_s = random.choice((0.0, 0.0, 0.05, 0.5))
    await post(fleet.decode_url + "/v1/completions", body, found, "transfers", headers, give_up_s)
