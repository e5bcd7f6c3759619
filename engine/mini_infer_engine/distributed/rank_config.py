"""What a rank's process is told before it can talk to the first rank, in a file that it reads when it starts."""

import subprocess
import sys
from pathlib import Path

import msgspec

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.config.child_start import start_child
from mini_infer_engine.config.options.settings import EngineSettings, num_nodes
from mini_infer_process.logs import LogFormat


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank other than the first."""

    settings: EngineSettings
    rank: int
    local_rank: int
    """Among the ranks of its machine: the index of its GPU, among those that the process sees."""
    store_host: str
    store_port: int
    """Where the group meets."""
    parent_pid: int
    kills_parent: bool
    """Whether its parent is the first rank in a process that serves: it is ended when it hangs, so that clients learn.
    """
    last_words_fd: int = -1
    """Where the reason of a group's end is left for whoever watches the first rank; -1: nobody does."""
    peer_key: str = ""
    """The service's secret where the group spans nodes, as 64 hexadecimal digits; "" if its ranks prove nothing."""
    engine: int | None = None
    """The number of its engine, where a server has several."""
    log_level: str = "info"
    log_format: LogFormat = "text"

    @property
    def secret(self) -> PeerSecret | None:
        """What proves to the first rank that this one belongs to the group, if that is on another node."""
        return PeerSecret(bytes.fromhex(self.peer_key)) if self.peer_key and num_nodes(self.settings) > 1 else None


class Addresses(msgspec.Struct, frozen=True):
    """Where the first rank talks with the others; told through the store."""

    signs: str
    steps: dict[int, str]
    """By rank."""
    transfer: str
    """Of KV transfer, where there is any."""
    results: str = ""
    """Where the last stage of a pipeline sends what passes have made."""


def spawn_rank(config: RankConfig, folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank's process, which dies with this one."""
    path = folder / f"rank-{config.rank}.json"
    path.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "mini_infer_engine.distributed.rank_process", str(path)]
    passed = (config.last_words_fd,) if config.last_words_fd >= 0 else ()
    return start_child(command, stdin=subprocess.DEVNULL, pass_fds=passed)
