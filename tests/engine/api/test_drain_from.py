"""Who may start a drain: nobody over the network, since nothing but a new process ends it."""

from typing import Any, cast

import httpx
import pytest

from mini_infer_engine.api.admission import Admission
from mini_infer_engine.api.app import make_app
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.config.server_options import ServerOptions


class Front:
    """What the route touches."""

    def __init__(self) -> None:
        self.draining, self.in_flight = False, 0
        self.options = ServerOptions()
        self.admission = Admission(1, 1)

    def start_drain(self) -> None:
        self.draining = True


@pytest.mark.parametrize(
    ("client", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.88.0.7", 403), ("fd00::7", 403), ("testclient", 403)]
)
async def test_a_drain_begins_from_the_same_machine_only(client: str, status: int) -> None:
    front = Front()
    app: Any = make_app(cast("ApiServerState", front))
    transport = httpx.ASGITransport(app, client=(client, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        answer = await http.post("/drain")
        assert answer.status_code == status
        assert front.draining == (status == 200)
        if status == 403:
            assert answer.json()["error"]["code"] == "drain_from_elsewhere"
        assert (await http.get("/drain")).status_code == 200
