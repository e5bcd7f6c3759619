"""The canary in an InferenceService's status, as tables: what routing takes from it."""

from typing import Any

import pytest

from mini_infer_contract.launch import EndpointsFile, ServiceReport
from mini_infer_gateway.endpoints.canary import Canary
from mini_infer_gateway.endpoints.service_status import canary_of, read_status
from mini_infer_gateway.endpoints.services import seen_service
from mini_infer_gateway.endpoints.static_file import services_in

RUNNING = {"phase": "Running", "revision": "r2", "stableRevision": "r1", "weight": 5, "mirror": 10, "replay": True}


@pytest.mark.parametrize(
    ("status", "canary"),
    [
        pytest.param(None, None, id="no status"),
        pytest.param({"canary": RUNNING}, Canary("r2", 0.05, 0.1, True), id="running"),
        pytest.param({"canary": RUNNING | {"weight": 700, "mirror": -1}}, Canary("r2", 1.0, 0.0, True), id="bounded"),
        pytest.param({"canary": RUNNING | {"phase": "RolledBack"}}, Canary("r2"), id="rolled back"),
        pytest.param({"canary": RUNNING | {"phase": "Promoted"}}, None, id="promoted"),
        pytest.param({"canary": RUNNING | {"weight": "much"}}, None, id="not readable"),
    ],
)
def test_canary_of_a_status(status: dict[str, Any] | None, canary: Canary | None) -> None:
    assert canary_of(read_status(status)) == canary
    manifest = {"metadata": {"name": "demo", "namespace": "default"}, "status": status}
    assert seen_service(manifest).service.canary == canary
    report = ServiceReport(name="default/demo", model="demo", status=status or {})
    found = services_in(EndpointsFile(services=[report]))
    assert (found[0].canary if found else None) == canary
