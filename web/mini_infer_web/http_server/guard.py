"""State that all connections of one server share: limits, counts by peer, allowed hosts, the log of refusals."""

from mini_infer_web.fair_budget import FairBudget
from mini_infer_web.http_server.hosts import AllowedHosts
from mini_infer_web.http_server.limits import UNFINISHED_MESSAGES_BYTES, ConnectionLimits
from mini_infer_web.http_server.peers import Peers
from mini_infer_web.http_server.refusal_log import RefusalLog
from mini_infer_web.http_server.slow_readers import SlowReaders


class ConnectionGuard:
    """The shared state of the connections of one server."""

    __slots__ = ("hosts", "limits", "log", "messages", "peers", "slow_readers")

    def __init__(self, limits: ConnectionLimits, hosts: AllowedHosts | None = None) -> None:
        self.limits, self.hosts = limits, hosts or AllowedHosts()
        self.peers, self.log = Peers(limits), RefusalLog()
        self.slow_readers = SlowReaders()
        self.messages = FairBudget(UNFINISHED_MESSAGES_BYTES)
        """Bytes of WebSocket messages that have arrived in part."""
