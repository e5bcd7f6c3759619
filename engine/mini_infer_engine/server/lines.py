"""Connects the front to its cores: to a single core, or to several behind a router. It starts no process."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.api.state import Core
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.peer_ports import PeerPorts
from mini_infer_engine.core_process.child_process import CoreProcess
from mini_infer_engine.data_parallel.publishing import UnitedPublisher
from mini_infer_engine.data_parallel.router import EngineRouter
from mini_infer_engine.server.core_client import CoreClient
from mini_infer_engine.server.data_parallel_client import DataParallelClient, EngineLine


@dataclass(frozen=True, slots=True)
class Lines:
    """The connections to all cores of a server."""

    core: Core
    """The engine as the rest of the server sees it."""
    all: Sequence[CoreClient]
    """One connection for each core."""
    publisher: UnitedPublisher | None = None
    """Publisher of all cores' events. None if a single core publishes by itself."""

    def close(self) -> None:
        """Closes all sockets."""
        for line in self.all:
            line.close()
        if self.publisher is not None:
            self.publisher.close()


def connect(
    cores: Sequence[CoreProcess],
    metrics: ServerMetrics,
    options: ServerOptions,
    settings: EngineSettings,
    peers: PeerPorts,
) -> Lines:
    """Connects to all cores; call it in a running event loop. Raises PortInUseError if a port for events is taken."""
    if len(cores) == 1:
        alone = CoreClient(cores[0].address, metrics)
        return Lines(alone, [alone])
    router = EngineRouter(len(cores), caches_prefixes=settings.enable_prefix_caching)
    publisher = UnitedPublisher(router, peers, options.events_port, options.replay_port)
    publisher.answer_replays()
    lines = [EngineLine(core.address, metrics, number, router, publisher) for number, core in enumerate(cores)]
    return Lines(DataParallelClient(lines, router, publisher), lines, publisher)
