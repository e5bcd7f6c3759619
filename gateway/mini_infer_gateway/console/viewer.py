"""Decides how much of the fleet a client of the console may see. Pure."""

from dataclasses import dataclass

from mini_infer_web.api_keys import ApiKeys, KeyGrant


@dataclass(frozen=True, slots=True)
class Viewer:
    """A client of the console."""

    everything: bool
    """True if it sees engines, prefixes and all requests; otherwise it sees services, and requests of its own key."""
    key: str = ""
    """Name of its key; "" if it has none."""

    def owns(self, key: str) -> bool:
        """True if a request of the key with this name is one of the viewer's own. A client without a key has none."""
        return bool(self.key) and key == self.key


def viewer_of(keys: ApiKeys, grant: KeyGrant | None, *, on_admin_port: bool, is_loopback: bool) -> Viewer:
    """Returns the viewer for a request with this grant.

    Everything is for administrators' keys, for a server's only key (there is no other tenant then), and, if there are
    no keys at all, for the admin port and for a gateway that only this machine can reach.
    """
    if grant is None:
        return Viewer(everything=not keys and (on_admin_port or is_loopback))
    return Viewer(grant.admin or keys.is_lone(grant), grant.name)
