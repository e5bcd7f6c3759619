"""State that all connections of one server share: limits, counts by peer, allowed hosts, the log of refusals."""

from mini_infer_web.http_server.hosts import AllowedHosts
from mini_infer_web.http_server.limits import ConnectionLimits
from mini_infer_web.http_server.peers import Peers
from mini_infer_web.http_server.refusal_log import RefusalLog


class ConnectionGuard:
    """The shared state of the connections of one server."""

    __slots__ = ("hosts", "limits", "log", "peers")

    def __init__(self, limits: ConnectionLimits, hosts: AllowedHosts | None = None) -> None:
        self.limits, self.hosts = limits, hosts or AllowedHosts()
        self.peers, self.log = Peers(limits), RefusalLog()
