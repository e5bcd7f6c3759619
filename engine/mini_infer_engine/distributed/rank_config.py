"""Defines the settings of a rank's process, which reads them from a file before it can connect to the first rank."""

import subprocess
import sys
from pathlib import Path

import msgspec

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.config.child_start import start_child
from mini_infer_engine.config.options.settings import EngineSettings, num_nodes
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, WeightExchange
from mini_infer_process.logs import LogFormat


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one rank other than the first."""

    settings: EngineSettings
    rank: int
    local_rank: int
    """Number among the ranks of its machine: the index of its GPU among those that the process sees."""
    store_host: str
    store_port: int
    """Host and port of the group's store."""
    parent_pid: int
    kills_parent: bool
    """True if the parent is the first rank in a server process. A rank ends it if it hangs, so that clients get an
    error.
    """
    exit_reason_fd: int = -1
    """File descriptor for the reason of a group's end, read by the first rank's parent; -1 if there is no reader."""
    peer_key: str = ""
    """The service's secret as 64 hexadecimal digits, for a group that spans nodes; empty if its ranks need no proof of
    membership.
    """
    weights: WeightExchange = NO_EXCHANGE
    engine: int | None = None
    """Number of its engine in a server with several; None if there is only one."""
    log_level: str = "info"
    log_format: LogFormat = "text"

    @property
    def secret(self) -> PeerSecret | None:
        """The secret by which this rank proves its membership to a first rank on another node, or None if there is
        none.
        """
        return PeerSecret(bytes.fromhex(self.peer_key)) if self.peer_key and num_nodes(self.settings) > 1 else None


class Addresses(msgspec.Struct, frozen=True):
    """Addresses of the first rank's sockets, which ranks read from the store."""

    heartbeats: str
    steps: dict[int, str]
    """Sockets for commands, by rank."""
    transfer: str
    """Socket for commands of KV transfer."""
    copies: str
    """Socket to which ranks report copies to and from main memory."""
    proofs: str
    """Socket to which ranks send what they find changed in main memory."""
    disks: str
    """Socket to which ranks report what has happened on their disks."""
    results: str = ""
    """Socket to which the last stage of a pipeline sends results; empty without a pipeline."""


def spawn_rank(config: RankConfig, folder: Path) -> subprocess.Popen[bytes]:
    """Starts a rank's process, which ends with this one."""
    path = folder / f"rank-{config.rank}.json"
    path.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "mini_infer_engine.distributed.rank_process", str(path)]
    passed = (config.exit_reason_fd,) if config.exit_reason_fd >= 0 else ()
    return start_child(command, stdin=subprocess.DEVNULL, pass_fds=passed)
