"""Defines the configuration of a core process, which reads it from a file before it can connect to the HTTP process."""

import msgspec

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.peer_ports import PeerPorts
from mini_infer_engine.dry.dry_run import DryRun
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, WeightExchange
from mini_infer_process.logs import LogFormat


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a core process."""

    settings: EngineSettings
    dry_run: DryRun | None
    peers: PeerPorts = PeerPorts()
    events_port: int
    replay_port: int
    transfer: TransferPort = TransferPort()
    weights: WeightExchange = NO_EXCHANGE
    engine: int | None = None
    """Number of this engine in a server with several, which is added to its log lines; the HTTP process then publishes
    events for all of them. None if it is the only engine.
    """
    log_level: str
    log_format: LogFormat
    address: str = ""
    """Address of the core's ROUTER socket. `CoreProcess` sets this and the fields below."""
    parent_pid: int = 0
    exit_reason_fd: int = -1
    """File descriptor to which the core writes the reason of its end if it cannot send it over its socket."""
