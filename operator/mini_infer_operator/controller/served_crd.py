"""Compares the CRD in the cluster with the one that this operator was made for, for as long as the operator runs.

An older CRD refuses new fields of the status, and drops those of the spec. The operator is then not ready, prints the
command that upgrades it, and writes only status fields that the old schema has. A newer CRD is reported in the log and
in a metric.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from mini_infer_operator.crd import custom_resource_definition
from mini_infer_operator.objects.served_schema import OPENAPI_PATH, Difference, Schema, compare, fitted, served_schema
from mini_infer_web.kubernetes_api import NETWORK_ERRORS, ApiError, ApiServer

log = logging.getLogger(__name__)

LOOK_EVERY_S = 300.0
LOOK_AGAIN_S = 5.0
"""Seconds between two checks while the CRD is not the right one, so that an upgrade makes the operator ready soon."""
UPGRADE = "mini-infer-operator --apply-crd"
_MAX_REPORTED_FIELDS = 5


class ServedCrd:
    """The served CRD as last seen."""

    def __init__(self, server: ApiServer, appeared: Callable[[], None] = lambda: None) -> None:
        """`appeared` is called when the CRD was missing and is there now."""
        self._server = server
        self._appeared = appeared
        (version,) = custom_resource_definition()["spec"]["versions"]
        self._ours: Schema = version["schema"]["openAPIV3Schema"]
        self._status: Schema | None = None
        self.state = "unknown"
        """State of the served CRD: current, older, newer, missing, or unknown if nothing was read yet."""
        self._problem = ""

    def problem(self) -> str:
        """Returns why the operator cannot work fully, with the command to type; "" if it can."""
        return self._problem

    def fit_status(self, status: dict[str, Any]) -> dict[str, Any]:
        """Returns the status without the fields that the served schema does not know."""
        return dict(fitted(status, self._status))

    async def run(self) -> None:
        """Checks the CRD periodically, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S if self.state in {"current", "newer"} else LOOK_AGAIN_S)

    async def look(self) -> None:
        """Reads the schema once; keeps the last state if that fails."""
        try:
            schema = served_schema(await self._server.request("GET", OPENAPI_PATH))
        except ApiError as error:
            if error.status != 404:
                log.warning("the CRD's schema cannot be read: %s", error)
                return
            schema = None
        except NETWORK_ERRORS as error:
            log.warning("the CRD's schema cannot be read: %s", error or type(error).__name__)
            return
        self._take(schema)

    def _take(self, schema: Schema | None) -> None:
        difference = compare(schema, self._ours) if schema is not None else Difference()
        state = difference.state if schema is not None else "missing"
        self._status = schema["properties"].get("status") if schema is not None else None
        self._problem = ""
        if state == "missing":
            self._problem = f"the CRD is not installed: kubectl apply --server-side -f crds/, or {UPGRADE}"
        elif state == "older":
            self._problem = (
                f"the CRD is older than this operator and lacks {_some(difference.missing)}: "
                f"kubectl apply --server-side --force-conflicts -f crds/, or {UPGRADE}"
            )
        if state != self.state and self._problem:
            log.error("%s", self._problem)
        elif state != self.state and state == "newer":
            log.warning(
                "the CRD is newer than this operator, which does not know %s: services that use it are not changed",
                _some(difference.unknown),
            )
        was, self.state = self.state, state
        if was == "missing" and state != "missing":
            self._appeared()


def _some(paths: tuple[str, ...]) -> str:
    more = len(paths) - _MAX_REPORTED_FIELDS
    return ", ".join(paths[:_MAX_REPORTED_FIELDS]) + (f" and {more} more" if more > 0 else "")
