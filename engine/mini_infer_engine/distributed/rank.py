"""Runs a rank other than the first: it loads its part of the model, and executes the first rank's commands."""

import gc
import logging
import os
import signal
import socket
from functools import partial

import msgspec
import torch
import zmq
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's

from mini_infer_engine.config.options.settings import group_name, num_nodes, num_ranks
from mini_infer_engine.distributed import step_messages
from mini_infer_engine.distributed.disk_copies import RankDisk
from mini_infer_engine.distributed.exit_reason import write_reason
from mini_infer_engine.distributed.heartbeats import HeartbeatSender
from mini_infer_engine.distributed.host_copies import RankCopies
from mini_infer_engine.distributed.member import GroupMember, rank_device
from mini_infer_engine.distributed.pass_results import ResultSender
from mini_infer_engine.distributed.process_group import LOOPBACK, join_store
from mini_infer_engine.distributed.rank_config import Addresses, RankConfig
from mini_infer_engine.distributed.shared_part import open_shared_part
from mini_infer_engine.distributed.swap_proofs import ProofSender
from mini_infer_engine.kv_transfer.transports.group_transport import serve_rank
from mini_infer_engine.runtime.executor import PassHandle
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_client

logger = logging.getLogger(__name__)

_COPIES_MS = 1
"""Milliseconds between two looks at copies under way, while no command comes."""
_HANDLES_KEPT = 4
"""Handles of launched passes that are kept because their memory may still be in use: the first rank has at most two
passes in flight, and one more for each further stage.
"""


class Rank:
    """A rank other than the first, with its connections to the first rank."""

    def __init__(self, config: RankConfig, store: Store) -> None:
        addresses = msgspec.json.decode(store.get("addresses"), type=Addresses)
        self._config, self._store = config, store
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._steps = context.socket(zmq.PULL)
        zmq_limits.LOCAL.apply(self._steps)
        secure_client(self._steps, config.secret)
        self._steps.set(zmq.IPV6, 1)
        self._steps.connect(addresses.steps[config.rank])
        self._transfer = context.socket(zmq.DEALER)
        zmq_limits.LOCAL.apply(self._transfer)
        secure_client(self._transfer, config.secret)
        self._transfer.set(zmq.IDENTITY, str(config.rank).encode())
        self._transfer.set(zmq.LINGER, 0)
        self._transfer.set(zmq.IPV6, 1)
        self._transfer.connect(addresses.transfer)
        self._copies = RankCopies(addresses.copies, config.rank, config.secret)
        self._disk = RankDisk(addresses.disks, config.rank, config.secret)
        self._proofs = ProofSender(addresses.proofs, config.rank, config.secret)
        self.heartbeats = HeartbeatSender(addresses.heartbeats, config.rank, self._lost, config.secret)
        is_last_stage = config.rank == num_ranks(config.settings) - config.settings.tensor_parallel_size
        self._results = ResultSender(addresses.results, config.secret) if is_last_stage else None

    def load(self) -> ModelRunner:
        """Loads this rank's part of the model, at the same time as all others."""
        config, settings = self._config, self._config.settings
        device = rank_device(settings.device, config.local_rank)
        host = LOOPBACK if num_nodes(settings) == 1 else own_address(config.store_host, config.store_port)
        member = GroupMember(config.rank, self._store, host, device, settings, self._agree)
        open_shared = partial(open_shared_part, settings, group=member) if settings.kv_host_path else None
        return load_runner(settings, member, weights=config.weights, open_shared=open_shared)

    def run(self, runner: ModelRunner) -> None:
        """Runs passes until the first rank sends `Stop`."""
        reader, handles = step_messages.StepReader(), list[PassHandle]()
        settings = self._config.settings
        kept = _HANDLES_KEPT + settings.pipeline_parallel_size - 1
        if (results := self._results) is not None:
            self._start(results, runner.device)
        self._copies.memory = runner.host_memory
        while True:
            match step_messages.decode(self._receive()):
                case step_messages.Launch() as message:
                    if not handles and self._is_of_a_server:
                        # Not sooner: the first rank reads a vocabulary, for seconds in which no thread of it speaks.
                        self.heartbeats.loaded()
                    batch = reader.batch(message, self._copies.take_followed(message.loads))
                    handles = [*handles[1 - kept :], runner.launch(batch)]
                    if (check := handles[-1].swap_check) is not None:
                        self._proofs.send(check.faults())
                    if results is not None and not message.waits_for_masks:
                        results.send(handles[-1])
                case step_messages.Sample() as message:
                    runner.sample(handles[-1], step_messages.masks_of(message))
                    if results is not None:
                        results.send(handles[-1])
                case step_messages.OpenTransport(choice, engine_id):
                    serve_rank(self._transfer, choice, engine_id, runner.kv_memory(), self._config.rank)
                case step_messages.CopyBlocks() as command:
                    self._copies.begin(command)
                case step_messages.OpenDisk() as command:
                    self._disk.open(command, runner.host_memory)
                case step_messages.WriteToDisk() as command:
                    self._disk.write(command)
                case step_messages.ReadFromDisk() as command:
                    self._disk.read(command)
                case step_messages.ClearDisk():
                    self._disk.clear()
                case step_messages.Stop():
                    return
                case step_messages.Agreed():
                    raise AssertionError("there is nothing to agree on while passes run")

    def _receive(self) -> bytes:
        """Returns the next command, and reports copies that end meanwhile."""
        self._report_copies()
        while (self._copies.are_under_way or self._disk.are_under_way) and not self._steps.poll(_COPIES_MS):
            self._report_copies()
        return self._steps.recv()

    def _report_copies(self) -> None:
        self._copies.report()
        self._disk.report()

    @property
    def _is_of_a_server(self) -> bool:
        """True if the first rank is in a server process. Otherwise it is in a user's program, which may hold the
        interpreter lock for seconds.
        """
        return self._config.kills_parent or num_nodes(self._config.settings) > 1

    def _start(self, results: ResultSender, device: torch.device) -> None:
        """Starts the sender of results, on the first rank of a pipeline's last stage."""

        def prepare() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)

        def failed(error: Exception) -> None:
            logger.error("rank %d: a pass fails", self._config.rank, exc_info=error)
            self.heartbeats.failed(failure(self._config, error))
            os._exit(1)

        results.start(prepare, failed)

    def _agree(self, value: int) -> list[int]:
        self.heartbeats.reached(value)
        message = step_messages.decode(self._steps.recv())
        if isinstance(message, step_messages.Stop):
            raise SystemExit(0)
        assert isinstance(message, step_messages.Agreed)
        return message.values

    def _lost(self, reason: str) -> None:
        """Ends this process after the loss of the first rank. It first leaves the reason for the first rank's parent,
        and kills the first rank.
        """
        logger.error("rank %d: %s", self._config.rank, reason)
        if self._config.kills_parent and os.getppid() == self._config.parent_pid:
            write_reason(self._config.exit_reason_fd, f"{reason} (reported by rank {self._config.rank})")
            os.kill(self._config.parent_pid, signal.SIGKILL)
        os._exit(1)


def own_address(host: str, port: int) -> str:
    """Returns the address of this machine for peers that are reached at `host`."""
    with socket.create_connection((host, port), timeout=10) as connection:
        address: str = connection.getsockname()[0]
        return address


def run_rank(config: RankConfig) -> int:
    """Loads and runs a rank, and reports failures to the first rank. Returns the exit status."""
    rank = Rank(config, join_store(config.store_host, config.store_port))
    try:
        runner = rank.load()
        gc.collect()
        gc.freeze()
        rank.run(runner)
    except Exception as error:
        if not _is_expected(error):
            logger.exception("rank %d fails", config.rank)
        rank.heartbeats.failed(failure(config, error))
        return 1
    return 0


def _is_expected(error: Exception) -> bool:
    """Returns True if the error's message is for people."""
    return isinstance(error, ValueError | OSError)


def failure(config: RankConfig, error: Exception) -> str:
    """Returns the reason why a rank cannot go on, for people."""
    message = str(error) if _is_expected(error) else f"{type(error).__name__}: {error}"
    return f"rank {config.rank} of the {group_name(config.settings)} failed: {message}"
