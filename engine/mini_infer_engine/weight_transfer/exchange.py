"""Describes an engine's part in the exchange of weights, for messages between its processes. No torch here."""

from typing import Literal, Protocol

import msgspec

from mini_infer_contract.peer_auth import PeerSecret

WeightSource = Literal["peers", "files", "auto"]
PORTS_PER_RANK = 2
"""Ports of one rank: control, and the port above it for the bytes of tensors."""


class WeightExchange(msgspec.Struct, frozen=True, kw_only=True):
    """The port at which this engine serves its weights, and the engines from which it may load them."""

    host: str = "127.0.0.1"
    port: int = 0
    """Control port of the first rank; 0 if this engine does not serve its weights."""
    peers: tuple[str, ...] = ()
    """Control addresses of other engines' first ranks, as host:port; a name may resolve to several engines."""
    key: str = ""
    """The service's secret as 64 hexadecimal digits; "" if peers prove nothing."""

    @property
    def secret(self) -> PeerSecret | None:
        """The service's secret, or None if peers prove nothing."""
        return PeerSecret(bytes.fromhex(self.key)) if self.key else None

    def port_of(self, rank: int) -> int:
        """Returns the control port of a rank of this engine."""
        return self.port + PORTS_PER_RANK * rank

    def __repr__(self) -> str:
        key = "..." if self.key else ""
        return f"WeightExchange(host={self.host!r}, port={self.port}, peers={self.peers}, key={key!r})"


NO_EXCHANGE = WeightExchange()


class LoadedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which an engine's weights were loaded."""

    source: Literal["files", "peer", "dummy"] = "files"
    peer: str = ""
    """Name of the engine that sent them; empty if they were read from files."""
    num_bytes: int = 0
    """Bytes on this rank's device."""
    seconds: float = 0.0
    fallback: str = ""
    """The reason why files were read although peers were named; empty if there is none."""

    def __str__(self) -> str:
        origin = f"peer {self.peer}" if self.source == "peer" else self.source
        rate = f", {self.num_bytes / 1e9 / self.seconds:.1f} GB/s" if self.seconds > 0 else ""
        reason = f" (not from a peer: {self.fallback})" if self.fallback else ""
        return f"weights from {origin}, {self.num_bytes / 1e9:.1f} GB{rate}{reason}"


FROM_FILES = LoadedWeights()


class ServedWeights(Protocol):
    """A server of weights, as the core process sees it."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights sent since the start."""

    def close(self) -> None:
        """Ends the server and all connections."""
