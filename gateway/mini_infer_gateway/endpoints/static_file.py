"""Reads endpoints from a file that is replaced from outside: JSON or YAML of contract.launch.EndpointsFile.

The file is checked twice a second. If it cannot be read, the last good list stays, and the error is logged once.
"""

import asyncio
import logging
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from mini_infer_contract.launch import EndpointsFile
from mini_infer_gateway.endpoints.base import NO_REPORTS, Listed, Publish, Reports, Service
from mini_infer_gateway.endpoints.service_status import canary_of, read_status
from mini_infer_gateway.http.upstream import address_of

POLL_S = 0.5

log = logging.getLogger(__name__)


class EndpointsFileError(ValueError):
    """The endpoints file is invalid; its author must change it."""


def read_endpoints(path: Path) -> EndpointsFile:
    """Returns the file's content. Raises EndpointsFileError, which names the field at fault."""
    try:
        # YAML is a superset of JSON, so one decoder reads both.
        content = msgspec.yaml.decode(path.read_bytes(), type=EndpointsFile)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EndpointsFileError(f"endpoints file {path}: {error}") from error
    names = [endpoint.name for endpoint in content.endpoints]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EndpointsFileError(f"endpoints file {path}: name {sorted(twice)[0]!r} is used twice; names must differ")
    for endpoint in content.endpoints:
        if endpoint.peer_auth == "service" and not endpoint.service:
            raise EndpointsFileError(
                f"endpoints file {path}: peer_auth of {endpoint.name!r} is 'service' and it names no service: write "
                "service: NAMESPACE/NAME, or peer_auth: shared"
            )
        try:
            address_of(endpoint.url)
            for events in filter(None, (endpoint.events, endpoint.replay, endpoint.transfer)):
                _check_zmq_address(events)
        except ValueError as error:
            raise EndpointsFileError(
                f"endpoints file {path}: an address of {endpoint.name!r} is not usable: {error} (its url is "
                f"{endpoint.url!r}, its events {endpoint.events!r}, its replay {endpoint.replay!r}, its "
                f"transfer {endpoint.transfer!r})"
            ) from None
    return content


def listed_in(content: EndpointsFile) -> list[Listed]:
    """Returns the endpoints of a file; those that drain are not ready."""
    return [Listed(endpoint, ready=not endpoint.draining) for endpoint in content.endpoints]


def services_in(content: EndpointsFile) -> list[Service] | None:
    """Returns the services that may have no engine or have a canary; None if there are none: then endpoints say whose
    they are.
    """
    services = [
        Service(one.name, one.created, one.model, one.starts_on_demand, canary_of(read_status(one.status)))
        for one in content.services
        if one.model
    ]
    return [one for one in services if one.starts_on_demand or one.canary is not None] or None


def _check_zmq_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or parts.port is None:
        raise ValueError("events, replay and transfer must be tcp://host:port")


class StaticFile:
    """An `EndpointSource` that reads an endpoints file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._reports = NO_REPORTS

    def reports(self) -> Reports:
        """Returns the services and pending engines that the file names."""
        return self._reports

    async def run(self, publish: Publish) -> None:
        """Reads the file at once, then whenever it has changed, until cancelled."""
        seen: tuple[int, int, int] | None = None
        synced = False
        complaint = ""
        while True:
            stamp = self._stamp()
            if stamp != seen or not synced:
                try:
                    content = read_endpoints(self._path)
                except EndpointsFileError as error:
                    if str(error) != complaint:
                        log.error("%s (%s)", error, "the last good list stays" if synced else "waiting for a good one")
                        complaint = str(error)
                else:
                    synced, complaint = True, ""
                    services = {service.name: read_status(service.status) for service in content.services}
                    self._reports = Reports(services, content.pending)
                    described = services_in(content)
                    if described is None:
                        publish(listed_in(content))
                    else:
                        publish(listed_in(content), described)
                seen = stamp
            await asyncio.sleep(POLL_S)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
