"""Moves pages by NIXL over UCX: CUDA IPC and shared memory on one host, RDMA or TCP between hosts, chosen by UCX
itself.

NIXL: https://github.com/ai-dynamo/nixl. `UCX_TLS` and similar variables work as UCX documents them.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_infer_engine.kv_transfer.layout import (
    KVLayout,
    KVMemory,
    Pool,
    Span,
    head_shares,
    pieces,
    shares_to_read,
    shares_to_write,
)
from mini_infer_engine.kv_transfer.pool_digests import PoolDigests
from mini_infer_engine.kv_transfer.protocol.wire import RankAddress, TransportAddress
from mini_infer_engine.kv_transfer.staging.nixl_staging import NixlStaging
from mini_infer_engine.kv_transfer.staging_slots import Area, StagingBuffer, blocks, blocks_for
from mini_infer_engine.kv_transfer.topology.locality import place_of_this_process
from mini_infer_engine.kv_transfer.topology.path_selection import choose_path, is_direct
from mini_infer_engine.kv_transfer.transport import (
    Digest,
    How,
    Motion,
    Motions,
    Progress,
    TransportChoice,
    TransportError,
)

log = logging.getLogger(__name__)

_BUILDS = ("nixl_cu13", "nixl_cu12")
"""Packages of the NIXL wheel, by CUDA's version; both run on hosts without a GPU."""
_SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}
_PROGRESS: dict[str, Progress] = {"DONE": "done", "PROC": "busy"}
_UCX_SETTINGS = {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}
"""Defaults for UCX where the environment has no value. Reads over TCP come in segments, one by one: with UCX's own 8 KB
and 64 KB they reach 0.8 GB/s, with these 1.2 to 3.8 GB/s, where writes reach 4 to 5.5 (8 MiB, loopback).
"""
_PROGRESS_PERIOD_US = 1000
"""The longest sleep of NIXL's progress thread, in microseconds, if UCX does not wake it."""


def load_nixl() -> Any:
    """Imports NIXL's Python module. Raises ImportError if none of its builds is installed."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    for build in _BUILDS:
        try:
            return importlib.import_module(f"{build}._api")
        except ModuleNotFoundError as error:
            if error.name != build:
                raise
    raise ImportError("no package nixl-cu13 or nixl-cu12")


class NixlTransport:
    """Implements `transport.Transport` by NIXL, directly between pools or through staging buffers."""

    def __init__(self, choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int = 0) -> None:
        """Registers the pool and the staging buffers. Raises ImportError if NIXL is not installed."""
        nixl = load_nixl()
        for name, value in _UCX_SETTINGS.items():
            os.environ.setdefault(name, value)
        self._through_host = choice.kind == "nixl-host"
        self.name = "nixl-host" if self._through_host else "nixl"
        self._memory, self._rank = memory, rank
        self._digests = PoolDigests(memory, rank)
        self.enter_thread()  # this one, which registers: of a group's rank it is not the one that has loaded the model
        self._segment = _SEGMENTS[memory.device]
        with _sleeping_progress_thread(nixl.nixlBind):
            self._agent = nixl.nixl_agent(_agent_name(engine_id, rank), nixl.nixl_agent_config(backends=["UCX"]))
        if "UCX" not in self._agent.backends:
            raise ImportError("this build of NIXL has no UCX backend")
        region = [(memory.address, memory.size, memory.device_index, "")]
        self._registered = self._agent.register_memory(region, self._segment)
        areas: list[Area] = ["host"] if self._through_host or memory.device == "cpu" else ["device", "host"]
        self._staging = {area: NixlStaging(memory, area, choice.staging_bytes) for area in areas}
        self._registered_staging = [
            self._agent.register_memory(
                [(staging.buffer.address, staging.num_bytes, memory.device_index, "")], _SEGMENTS[staging.buffer.device]
            )
            for staging in self._staging.values()
        ]
        self._place = place_of_this_process()
        self._peers: dict[str, tuple[KVLayout, TransportAddress]] = {}

    def enter_thread(self) -> None:
        """Sets the thread's CUDA device: the current device and context are per thread, and UCX uses those."""
        if self._memory.device == "cuda":
            import torch

            torch.cuda.set_device(self._memory.device_index)
        self._digests.prepare()

    def describe(self) -> TransportAddress:
        """Returns the agent's metadata, and the addresses of the pool and the staging buffers."""
        memory = self._memory
        here = RankAddress(
            metadata=self._agent.get_agent_metadata(),
            address=memory.address,
            device=memory.device,
            device_index=memory.device_index,
            place=self._place,
            staging={area: staging.buffer for area, staging in self._staging.items()},
        )
        return TransportAddress(self.name, [here])

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """Connects the agent to those ranks of the peer that share heads with this one. Raises TransportError if NIXL
        cannot.
        """
        if self._peers.get(engine_id) == (layout, where):
            return
        self.remove_peer(engine_id)
        self._peers[engine_id] = layout, where
        try:
            for share in head_shares(self._memory.layout, self._rank, layout):
                self._agent.add_remote_agent(where.ranks[share.their_rank].metadata)
                self._agent.make_connection(_agent_name(engine_id, share.their_rank))
        except Exception as error:  # NIXL has a class of its own for each of its faults
            self.remove_peer(engine_id)
            raise TransportError(f"NIXL cannot reach {engine_id}: {error}") from error

    def remove_peer(self, engine_id: str) -> None:
        """Disconnects the agent from the peer's ranks."""
        layout, _ = self._peers.pop(engine_id, (None, None))
        if layout is None:
            return
        for share in head_shares(self._memory.layout, self._rank, layout):
            try:
                self._agent.remove_remote_agent(_agent_name(engine_id, share.their_rank))
            except Exception as error:
                log.info("NIXL has forgotten %s already: %s", engine_id, error)

    def reaches(self, engine_id: str) -> bool:
        """Returns True if NIXL is connected to the peer."""
        return engine_id in self._peers

    def tend(self) -> None:
        """Does nothing: NIXL keeps little of a peer, and does not pin its memory."""

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """Begins one NIXL transfer with each rank of the peer that shares heads with this one."""
        ours, (theirs, where) = self._memory.layout, self._peer(engine_id)
        parts = list[_Part]()
        for share in (shares_to_write if how == "write" else shares_to_read)(ours, self._rank, theirs):
            table = pieces(ours, theirs, span, share)
            parts.append(_Part(share.their_rank, table, self._memory, where.ranks[share.their_rank]))
        return self._begin(engine_id, how, parts)

    def _begin(self, engine_id: str, how: How, parts: "list[_Part]") -> Motion:
        motions: list[Motion] = []
        try:
            for part in parts:
                here = self._descriptors(part.table[:, 0], part.table[:, 2], part.here)
                there = self._descriptors(part.table[:, 1], part.table[:, 2], part.there)
                handle = self._agent.initialize_xfer(how.upper(), here, there, _agent_name(engine_id, part.their_rank))
                self._agent.transfer(handle)
                motions.append(_NixlMotion(self._agent, handle, int(part.table[:, 2].sum())))
        except Exception as error:  # NIXL has a class of its own for each of its faults
            if motions:  # they go on
                return Motions(motions, has_failed=True)
            self.remove_peer(engine_id)  # so that it is connected anew where it greets again
            raise TransportError(f"NIXL cannot {how} at {engine_id}: {error}") from error
        return motions[0] if len(motions) == 1 else Motions(motions)

    # -- Through staging buffers

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        """Chooses the path by the two layouts, and by whether the peer's pool can be reached directly."""
        theirs, where = self._peer(engine_id)
        there = where.ranks[0]
        return choose_path(
            self._memory.layout,
            theirs,
            span,
            device=self._memory.device,
            can_be_direct=is_direct(self._place, self._memory.device, there.place, there.device),
            through_host=self._through_host,
        )

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        """Returns the bytes of a slot, the smaller of both sides'. The transport has one pool."""
        del pool
        _, where = self._peer(engine_id)
        return min(self._staging[area].buffer.slot_bytes, _buffer_of(where.ranks[0], area).slot_bytes)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Gathers tokens into a slot of this rank's buffer."""
        theirs, _ = self._peer(engine_id)
        return self._staging[area].gather(self._rank, theirs, slot, span)

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """Writes each block of a slot to the rank of the consumer that needs it."""
        ours, (theirs, where) = self._memory.layout, self._peer(engine_id)
        buffer, parts = self._staging[area].buffer, list[_Part]()
        for block in blocks(ours, self._rank, theirs, span):
            there = _buffer_of(where.ranks[block.consumer_rank], area)
            target_blocks = blocks_for(ours, theirs, block.consumer_rank, span)
            offset = next(offset for other, offset in target_blocks if other.producer_rank == self._rank)
            table = (slot * buffer.slot_bytes + block.offset, their_slot * there.slot_bytes + offset, block.size)
            parts.append(_Part(block.consumer_rank, np.array([table], np.int64), buffer, there))
        return self._begin(engine_id, "write", parts)

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Copies a slot of this rank's buffer into pages."""
        return self._staging[area].place(self._rank, self._peer(engine_id)[0], slot, span)

    def _peer(self, engine_id: str) -> tuple[KVLayout, TransportAddress]:
        if engine_id not in self._peers:
            raise TransportError(f"{engine_id} is not connected")
        return self._peers[engine_id]

    def _descriptors(self, offsets: np.ndarray, sizes: np.ndarray, pool: KVMemory | RankAddress | StagingBuffer) -> Any:
        table = np.empty((len(offsets), 3), np.uint64)
        table[:, 0] = offsets + pool.address
        table[:, 1] = sizes
        table[:, 2] = pool.device_index
        return self._agent.get_xfer_descs(table, _SEGMENTS[pool.device])

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        """Begins to compute the digest of tokens in our pool."""
        return self._digests.begin(span, consumer)

    def close(self) -> None:
        """Removes all peers, and deregisters all memory."""
        for engine_id in list(self._peers):
            self.remove_peer(engine_id)
        for registered in (self._registered, *self._registered_staging):
            self._agent.deregister_memory(registered)


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a transfer that goes to or comes from one rank of the peer."""

    their_rank: int
    table: np.ndarray
    """Pieces [pieces, 3] int64: offset here, offset there, and bytes."""
    here: KVMemory | StagingBuffer
    there: RankAddress | StagingBuffer


@contextlib.contextmanager
def _sleeping_progress_thread(binding: Any) -> Iterator[None]:
    """Gives agents that are made within the block a progress thread that sleeps between events.

    NIXL's Python module always sets a delay of 0, with which the thread polls without a pause: each rank would use a
    whole processor with nothing in flight.
    """
    make = binding.nixlAgent

    def make_sleeping(name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_PERIOD_US
        return make(name, config)

    binding.nixlAgent = make_sleeping
    try:
        yield
    finally:
        binding.nixlAgent = make


def _buffer_of(rank: RankAddress, area: Area) -> StagingBuffer:
    if area not in rank.staging:
        raise TransportError(f"that engine has no staging buffer in its {area}'s memory")
    return rank.staging[area]


def _agent_name(engine_id: str, rank: int) -> str:
    return f"{engine_id}/{rank}"


class _NixlMotion:
    def __init__(self, agent: Any, handle: Any, num_bytes: int) -> None:
        self._agent = agent
        self._handle = handle
        self.num_bytes = num_bytes
        self._end: Progress | None = None

    def progress(self) -> Progress:
        """Polls the transfer, and releases its handle once it has ended."""
        if self._end is not None:
            return self._end
        try:
            progress = _PROGRESS.get(self._agent.check_xfer_state(self._handle), "failed")
        except Exception as error:  # NIXL has a class of its own for each of its faults
            log.info("a transfer fails: %s", error)
            progress = "failed"
        if progress != "busy":
            self._end = progress
            with contextlib.suppress(Exception):  # of one that has failed, too, only memory is left to be freed
                self._agent.release_xfer_handle(self._handle)
        return progress
