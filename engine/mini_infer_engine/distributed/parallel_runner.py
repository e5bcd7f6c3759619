"""Runs the first rank: it has a part of the model like every other rank, sends commands to the others, and watches
them.

To the engine it is one `batch.Runner`: all ranks get the same batches. In a tensor-parallel group all ranks sample the
same tokens, and the first rank's are the result. In a pipeline the last stage's are.
"""

import logging
import os
import shutil
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch
import zmq
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import (
    EngineSettings,
    ResolvedSettings,
    group_name,
    master_address,
    num_nodes,
    num_ranks,
    ranks_per_node,
)
from mini_infer_engine.config.socket_folder import socket_folder
from mini_infer_engine.core.batch import Batch, RunnerLostError, TokenMasks
from mini_infer_engine.core.kv_transfer import LayerProgress
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.distributed import step_messages
from mini_infer_engine.distributed.disk_copies import GroupDiskMemory
from mini_infer_engine.distributed.group_layers import GroupLayers
from mini_infer_engine.distributed.heartbeats import Watch
from mini_infer_engine.distributed.host_copies import GroupHostMemory, tickets_of
from mini_infer_engine.distributed.member import GroupMember, rank_device
from mini_infer_engine.distributed.pass_results import ResultReceiver
from mini_infer_engine.distributed.process_group import LOOPBACK, open_store
from mini_infer_engine.distributed.rank_config import Addresses, RankConfig, spawn_rank
from mini_infer_engine.distributed.shared_part import Identify, open_shared_part
from mini_infer_engine.distributed.swap_proofs import ProofReceiver
from mini_infer_engine.kv_disk.disk_store import DiskStore
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.transport import TransportChoice
from mini_infer_engine.kv_transfer.transports.group_transport import GroupTransport, open_group_transport
from mini_infer_engine.runtime.executor import PassHandle
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, LoadedWeights, WeightExchange
from mini_infer_engine.weight_transfer.server import WeightServer
from mini_infer_process import zmq_limits
from mini_infer_process.curve import PeerAuthenticator, secure_server
from mini_infer_process.listening import tcp_address
from mini_infer_process.logs import LogFormat

log = logging.getLogger(__name__)

_STOP_S = 2.0
"""Seconds for ranks to end by themselves."""
_LOOK_MS = 100
"""Milliseconds between two checks that the group still runs, while a rank accepts no message."""
_END_LOADING_S = 10.0
"""Seconds after the loss of a rank for the main thread to notice it while loading: it may be in a compiler, too."""
_REASON_S = 4.0
"""Seconds for the watch to find the reason of a failed pass: a hung rank is detected after three seconds."""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a group's end to a server process, beside the exception. Users of the library get the exception alone."""

    on_lost: Callable[[str], None] | None = None
    """Function for the end of the group. Another thread calls it, because the main thread may hang."""
    exit_reason_fd: int = -1
    folder: Path | None = None
    """Folder for the files of the ranks' sockets, which the parent removes if this process is killed. None means a new
    one.
    """
    peer_key: str = ""
    """The service's secret as 64 hexadecimal digits, for ranks on other nodes; empty if they need no proof of
    membership.
    """
    weights: WeightExchange = NO_EXCHANGE
    engine: int | None = None
    """Number of this engine in a server with several, for the log lines of its ranks."""
    log_level: str = "info"
    log_format: LogFormat = "text"


NOT_WATCHED = Watched()


class Ranks:
    """Processes of the other ranks on this machine, and sockets to all other ranks."""

    def __init__(self, settings: EngineSettings, store: TCPStore, watched: Watched) -> None:
        self.size = num_ranks(settings)
        local = range(1, ranks_per_node(settings))
        self._folder = watched.folder or socket_folder("mini-infer-ranks-")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        router = context.socket(zmq.ROUTER)
        zmq_limits.LOCAL.apply(router)
        host = "" if num_nodes(settings) == 1 else master_address(settings)
        self._secret = PeerSecret(bytes.fromhex(watched.peer_key)) if host and watched.peer_key else None
        authenticator = PeerAuthenticator(context, self._secret) if self._secret is not None else None
        heartbeats = self._bind(router, "signs", host)
        self._transfer = context.socket(zmq.ROUTER)
        zmq_limits.LOCAL.apply(self._transfer)
        self._transfer.set(zmq.LINGER, 0)
        transfer = self._bind(self._transfer, "transfer", host)
        self._steps = {rank: context.socket(zmq.PUSH) for rank in range(1, self.size)}
        steps = {}
        for rank, socket in self._steps.items():
            zmq_limits.LOCAL.apply(socket)
            steps[rank] = self._bind(socket, f"steps-{rank}", host)
        results, results_at = None, ""
        if settings.pipeline_parallel_size > 1:
            results = context.socket(zmq.PULL)
            zmq_limits.LOCAL.apply(results)
            results_at = self._bind(results, "results", host)
        proofs = context.socket(zmq.PULL)
        zmq_limits.LOCAL.apply(proofs)
        self.copies = context.socket(zmq.PULL)
        """Socket at which ranks report copies to and from main memory."""
        zmq_limits.LOCAL.apply(self.copies)
        self.disks = context.socket(zmq.PULL)
        """Socket at which ranks report what has happened on their disks."""
        zmq_limits.LOCAL.apply(self.disks)
        copies_at, proofs_at = self._bind(self.copies, "copies", host), self._bind(proofs, "proofs", host)
        disks_at = self._bind(self.disks, "disks", host)
        addresses = Addresses(heartbeats, steps, transfer, copies_at, proofs_at, disks_at, results_at)
        store.set("addresses", msgspec.json.encode(addresses).decode())
        self.processes = {rank: self._spawn(settings, rank, store.port, watched) for rank in local}
        ranks, processes = weakref.ref(self), self.processes  # the thread does not keep this object alive

        def lost(reason: str) -> None:
            if (found := ranks()) is not None:
                found._on_lost(reason)

        self.watch = Watch(router, range(1, self.size), lambda: _ended(processes), lost, group_name(settings))
        watch = self.watch
        self.results = None if results is None else ResultReceiver(results, lambda: watch.lost)
        """Receiver of a pipeline's results from its last stage; None without a pipeline."""
        self.proofs = ProofReceiver(proofs, self.size, lambda: watch.lost)
        """Receiver of what other ranks find changed in main memory."""
        self._report_lost = watched.on_lost
        self.release: Callable[[], None] | None = None
        """Function that aborts the operations for which this rank's device waits."""
        self._meets = False
        """True once all ranks have their weights: from then on they wait for each other."""
        self.left_loading = threading.Event()
        """Set when the main thread has left loading, or has noticed the loss of a rank."""
        self.close = weakref.finalize(
            self,
            _close,
            self.watch,
            self.processes,
            self._steps,
            (router, results, proofs, self.copies, self.disks),
            self._folder,
            os.getpid(),
            authenticator,
        )

    def _bind(self, socket: zmq.Socket[bytes], name: str, host: str) -> str:
        """Binds a socket, and returns its address: a file for processes of this machine, or a port for ranks that reach
        it at `host`.
        """
        if not host:
            address = f"ipc://{self._folder}/{name}"
            socket.bind(address)
            return address
        secure_server(socket, self._secret)
        socket.set(zmq.IPV6, 1)  # nodes of an IPv6-only cluster have nothing else
        return tcp_address(host, socket.bind_to_random_port("tcp://*"))

    def loaded(self) -> None:
        """Ends loading once all ranks have connected. The files of their sockets are removed, so that nothing is left
        if this process is killed.
        """
        self.watch.loaded()
        if self.results is not None:
            self.results.connected()
        self.left_loading.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, settings: EngineSettings, rank: int, port: int, watched: Watched) -> subprocess.Popen[bytes]:
        config = RankConfig(
            settings=settings,
            rank=rank,
            local_rank=rank,
            store_host=LOOPBACK,
            store_port=port,
            parent_pid=os.getpid(),
            kills_parent=watched.on_lost is not None,
            exit_reason_fd=watched.exit_reason_fd,
            weights=watched.weights,
            engine=watched.engine,
            log_level=watched.log_level,
            log_format=watched.log_format,
        )
        return spawn_rank(config, self._folder)

    def _on_lost(self, reason: str) -> None:
        for process in self.processes.values():
            process.kill()  # so that a collective of the main thread breaks off
        if self._report_lost is not None:
            self._report_lost(reason)  # which ends the process
        if self._meets and not self.left_loading.is_set():
            threading.Thread(target=self._end_loading, name="rank-lost", daemon=True).start()
        if self.release is not None:
            self.release()

    def _end_loading(self) -> None:
        """Ends this process if loading does not end soon: NCCL and torch's store may wait for a lost rank, where no
        exception reaches them.
        """
        if not self.left_loading.wait(_END_LOADING_S):
            log.error("what waits for that rank cannot be broken off: this process ends")
            os._exit(1)

    def send(self, message: step_messages.StepMessage) -> None:
        """Sends a message to every other rank."""
        payload = step_messages.encode(message)
        for socket in self._steps.values():
            send_step(socket, payload, lambda: self.watch.lost)

    def open_transport(self, choice: TransportChoice, engine_id: str, memory: KVMemory) -> GroupTransport:
        """Opens the transport of all ranks' pages from and to other engines. Raises ModelError if it cannot work on one
        of them.
        """
        self.send(step_messages.OpenTransport(choice, engine_id))
        return open_group_transport(choice, engine_id, memory, self.size, self._transfer, lambda: self.watch.lost)

    def agree(self, value: int) -> list[int]:
        """Waits until all ranks have reached the same point, and returns one number of each. Raises ModelError if a
        rank has failed.
        """
        try:
            values = [value, *self.watch.gather()]
        except RuntimeError as error:
            raise ModelError(str(error)) from None
        self.send(step_messages.Agreed(values))
        self._meets = True
        return values


def _ended(processes: Mapping[int, "subprocess.Popen[bytes]"]) -> dict[int, int]:
    """Returns the exit statuses of ranks whose processes have ended, by rank."""
    found = {rank: process.poll() for rank, process in processes.items()}
    return {rank: status for rank, status in found.items() if status is not None}


def _close(
    watch: Watch,
    processes: dict[int, subprocess.Popen[bytes]],
    steps: dict[int, zmq.Socket[bytes]],
    sockets: tuple[zmq.Socket[bytes] | None, ...],
    folder: Path,
    pid: int,
    authenticator: PeerAuthenticator | None,
) -> None:
    """Sends `Stop` to all ranks, and kills those that do not end."""
    if os.getpid() != pid:
        return  # a fork of the process: the ranks are not its own
    watch.close()
    for rank, socket in steps.items():
        try:
            socket.send(step_messages.encode(step_messages.Stop()), zmq.NOBLOCK)
        except zmq.Again:  # it still starts, and listens to nobody
            if rank in processes:
                processes[rank].kill()
        socket.close(linger=500)
    for listening in sockets:
        if listening is not None:
            listening.close(linger=0)
    if authenticator is not None:
        authenticator.close()
    for process in processes.values():
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class ParallelRunner:
    """Implements `batch.Runner` for a group of ranks. `local` is this rank's own part of the model."""

    def __init__(self, local: ModelRunner, ranks: Ranks, store: TCPStore) -> None:
        self.local, self.ranks = local, ranks
        self._store = store  # the first rank's is the one that all others talk to
        self.settings: ResolvedSettings = local.settings
        self.all_reduce = local.worker.collectives.kind
        """Name of the collectives between the ranks, for people."""
        self.config, self.device = local.config, local.device
        self.page_size, self.num_pages = local.page_size, local.num_pages
        self.kv_cache, self.memory = local.kv_cache, local.memory
        self.max_model_len, self.swap_space = local.max_model_len, local.swap_space
        self.eviction_obstacle = local.eviction_obstacle
        memory = local.host_memory
        self.host_memory = None
        if memory is not None:
            self.host_memory = GroupHostMemory(
                memory, ranks.size, ranks.send, ranks.copies, memory.shared, lambda: ranks.watch.lost
            )
        self.max_speculative_rows = local.max_speculative_rows
        self._writer = step_messages.StepWriter(self.page_size)
        self._results = ranks.results
        self._reporting: deque[tuple[PassHandle, GroupLayers]] = deque()
        """Passes in flight that report their layers, in the order of launches."""
        self._proved: deque[PassHandle] = deque()
        """Passes in flight that bring something back from main memory, in the order of launches."""

    @property
    def loaded(self) -> LoadedWeights:
        """The way in which this rank's weights were loaded."""
        return self.local.loaded

    @property
    def start_seconds(self) -> dict[str, float]:
        """Seconds of each stage of this rank's loading, by its name."""
        return self.local.start_seconds

    @property
    def weight_server(self) -> WeightServer | None:
        """The server of this rank's weights, or None."""
        return self.local.weight_server

    def kv_memory(self) -> KVMemory:
        """Returns this rank's own page pool, for KV transfer."""
        return self.local.kv_memory()

    def open_transport(self, choice: TransportChoice, engine_id: str) -> GroupTransport:
        """Opens the transport of all ranks."""
        return self.ranks.open_transport(choice, engine_id, self.kv_memory())

    def spread_disk(self, local: DiskStore, identity: str) -> GroupDiskMemory:
        """Opens the disks of all ranks beside this one's. Raises OSError or ValueError if one cannot be opened."""
        watch = self.ranks.watch
        disk = GroupDiskMemory(local, self.ranks.size, self.ranks.send, self.ranks.disks, lambda: watch.lost)
        command = step_messages.OpenDisk(str(local.path), identity, local.capacity_bytes, self.page_size)
        disk.open(command)
        return disk

    def refuses(self, request: Request) -> str | None:
        """Returns the reason why this rank's model cannot serve the request, or None; it holds for all ranks."""
        return self.local.refuses(request)

    def launch(self, batch: Batch) -> PassHandle:
        """Launches a pass on all ranks. Raises RunnerLostError if the group has ended."""
        reported = self._report_all_ranks(batch)
        with self._all_or_nothing():
            self.ranks.send(self._writer.launch(batch, tickets_of(batch.layerwise_loads)))
            handle = self.local.launch(batch)
        self._reporting.extend((handle, layers) for layers in reported)
        if handle.swap_check is not None:
            self._proved.append(handle)
        return handle

    def _report_all_ranks(self, batch: Batch) -> list[GroupLayers]:
        """Replaces the batch's `report_layers`, so that it gets the progress of all ranks. The launch fills the
        returned list.
        """
        report, reported = batch.report_layers, list[GroupLayers]()
        if report is not None:
            num_layers = self.kv_memory().layout.num_layers

            def report_all(own: LayerProgress) -> None:
                reported.append(GroupLayers(own, num_layers))
                report(reported[-1])

            batch.report_layers = report_all
        return reported

    def guesses(self, handle: PassHandle) -> Mapping[int, Sequence[int]]:
        """Returns this rank's guesses: all ranks guess the same tokens."""
        with self._all_or_nothing():
            return self.local.guesses(handle)

    def sample(self, handle: PassHandle, masks: TokenMasks) -> None:
        """Sends the masks to all ranks, and samples on all."""
        with self._all_or_nothing():
            self.ranks.send(step_messages.masks_message(masks))
            self.local.sample(handle, masks)

    def collect(self, handle: PassHandle) -> PassResult:
        """Returns the result of a pass, in a pipeline from its last stage. Raises RunnerLostError if the group has
        ended.
        """
        with self._all_or_nothing():
            result = self.local.collect(handle) if self._results is None else self._results.next()
            if self._proved and self._proved[0] is handle:
                own = self._proved.popleft().swap_check
                faults = set() if own is None else set(own.faults())
                result.swap_faults = sorted(faults | self.ranks.proofs.next())
        while self._reporting and self._reporting[0][0] is handle:
            self._reporting.popleft()[1].has_ended = True
        return result

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Raises RunnerLostError after any failure: a pass that fails on one rank leaves the others in the middle of
        it.
        """
        if self.ranks.watch.lost:
            raise RunnerLostError(self.ranks.watch.lost)
        try:
            yield
        except Exception as error:
            reason = self.ranks.watch.reason(_REASON_S)
            reason = reason or f"rank 0 of the {group_name(self.settings)} failed: {type(error).__name__}: {error}"
            raise RunnerLostError(reason) from error
        if self.ranks.watch.lost:  # what has come may be of a sum that was broken off
            raise RunnerLostError(self.ranks.watch.lost)


def send_step(socket: zmq.Socket[bytes], payload: bytes, lost: Callable[[], str]) -> None:
    """Sends a command to a rank, which may still start, while `lost` returns an empty string: ZeroMQ would block for
    ever for a lost rank.

    Raises RunnerLostError if the group has ended.
    """
    while True:
        try:
            socket.send(payload, zmq.NOBLOCK)
            return
        except zmq.Again:
            if reason := lost():
                raise RunnerLostError(reason) from None
            socket.poll(_LOOK_MS, zmq.POLLOUT)


def load_parallel(
    settings: EngineSettings,
    watched: Watched = NOT_WATCHED,
    *,
    reports_layers: bool = False,
    identify: Identify | None = None,
) -> ParallelRunner:
    """Starts the other ranks of this machine, loads this rank's part with them, and waits until all are ready.

    `reports_layers` has passes honour `Batch.report_layers` (see `Executor.capture`); only this rank counts layers.
    `identify` names the blocks of main memory that other engines share.

    Raises:
        ModelError: the model or the settings are at fault, or a rank cannot load its part.
        ValueError: there are too few GPUs.
    """
    device = rank_device(settings.device, 0)
    store = open_store(settings.master_port if num_nodes(settings) > 1 else 0)
    ranks = Ranks(settings, store, watched)
    try:
        host = LOOPBACK if num_nodes(settings) == 1 else master_address(settings)
        member = GroupMember(0, store, host, device, settings, ranks.agree)
        ranks.release = member.late.release
        shared = partial(open_shared_part, settings, group=member, identify=identify) if settings.kv_host_path else None
        own = load_runner(settings, member, reports_layers=reports_layers, weights=watched.weights, open_shared=shared)
        runner = ParallelRunner(own, ranks, store)
        ranks.loaded()
    except BaseException as error:
        ranks.left_loading.set()
        reason = ranks.watch.reason(0 if isinstance(error, ValueError) else 1.0)
        ranks.close()
        if reason and isinstance(error, Exception):
            raise ModelError(reason) from error
        raise
    if device.type == "cuda":
        torch.cuda.synchronize()
    return runner
