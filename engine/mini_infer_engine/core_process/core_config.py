"""All that the front tells the core before they can talk; written to a file that the core reads when it starts."""

import msgspec

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.peer_ports import PeerPorts
from mini_infer_engine.dry.dry_run import DryRun
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_process.logs import LogFormat


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the front tells the core before they can talk."""

    settings: EngineSettings
    dry_run: DryRun | None
    peers: PeerPorts = PeerPorts()
    events_port: int
    replay_port: int
    transfer: TransferPort = TransferPort()
    engine: int | None = None
    """Its number among the engines of a server that has several: its front publishes for all of them, and its lines in
    the log have the number. None: it is the only one."""
    log_level: str
    log_format: LogFormat
    address: str = ""
    """Of the core's ROUTER socket; this and the next ones are core_process.py's to fill."""
    parent_pid: int = 0
    last_words_fd: int = -1
    """Where the core says why it ends when it cannot say it over its socket."""
