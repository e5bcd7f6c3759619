"""The planners of services in a cluster: reports in, numbers and Events out."""

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mini_infer_contract.scaling import SCALING_PATH, EngineLoad, GatewayLoads, ServiceLoad
from mini_infer_operator.controller.scaling import UNHEARD_S, Scaling
from mini_infer_operator.objects.cache import ObjectCache
from mini_infer_operator.objects.events import EventRecorder
from mini_infer_operator.objects.gateway_loads import GatewayLoadReader, host_and_port
from mini_infer_operator.resource import KIND, LABEL_REVISION, LABEL_ROLE, LABEL_SERVICE
from tests.support.services import changed

SCALED = {"minReplicas": 0, "maxReplicas": 4, "windows": {"downSeconds": 5, "zeroSeconds": 10}}


def engine(service: str) -> dict[str, Any]:
    """Returns a ready pod of the service."""
    labels = {LABEL_SERVICE: service, LABEL_ROLE: "unified"}
    metadata = {"name": f"{service}-0", "namespace": "default", "uid": f"{service}-0", "resourceVersion": "1"}
    ready = {"type": "Ready", "status": "True"}
    return {"metadata": metadata | {"labels": labels}, "spec": {}, "status": {"conditions": [ready]}}


class World:
    """Services in a cache, a clock, and what became of the reports."""

    def __init__(self, gpus: float = float("inf"), **services: dict[str, Any]) -> None:
        self.cache, self.now_s, self.changed = ObjectCache(), 0.0, list[tuple[str, str]]()
        self.events: list[tuple[str, str]] = []
        recorder = EventRecorder(lambda about, event_type, reason, message: self.events.append((reason, message)))
        self.scaling = Scaling(
            self.cache,
            None,
            recorder,
            self.changed.append,
            gpus,
            lambda: self.now_s,  # type: ignore[arg-type]
        )
        for name, unified in services.items():
            stored = changed({"metadata": {"name": name, "uid": name}, "spec": {"unified": unified}})
            stored["metadata"] |= {"resourceVersion": "1"}
            self.cache.written(KIND, stored)
            self.cache.written("Pod", engine(name))
            self.scaling.update(("default", name), stored)

    def step(self, now_s: float, **queued: int) -> None:
        self.now_s = now_s
        services = {f"default/{name}": ServiceLoad(queued_requests=count) for name, count in queued.items()}
        self.scaling.step({"http://gateway": GatewayLoads(1.0, services)})

    def decided(self, name: str) -> dict[str, int]:
        return dict(self.scaling.decided(("default", name)))


def test_service_sleeps_and_wakes_with_an_event_that_says_why() -> None:
    world = World(demo={"replicas": 1, "scaling": SCALED})
    for second in range(20):
        world.step(float(second))
    assert world.decided("demo") == {"unified": 0}
    assert world.changed == [("default", "demo")]
    world.step(21.0, demo=3)
    assert world.decided("demo") == {"unified": 1}
    assert world.changed == [("default", "demo")] * 2
    assert [message.split(":")[0] for _, message in world.events] == [
        "unified goes from 1 to 0",
        "unified goes from 0 to 1",
    ]
    assert {reason for reason, _ in world.events} == {"Planned"}


def test_gateways_are_read_more_often_when_a_service_sleeps() -> None:
    world = World(demo={"replicas": 1, "scaling": SCALED}, other={"replicas": 1, "scaling": SCALED})
    world.step(0.0, demo=1, other=1)
    assert world.scaling.pause_s(took_s=0.0) == 1.0
    for second in range(1, 20):
        world.step(float(second), other=1)
    assert world.decided("demo") == {"unified": 0}
    assert world.scaling.pause_s(took_s=0.0) == 0.2
    assert world.scaling.pause_s(took_s=0.05) == 0.5
    assert world.scaling.pause_s(took_s=3.0) == 1.0


def test_service_without_scaling_is_never_planned() -> None:
    world = World(demo={"replicas": 3}, owned={"scaling": {**SCALED, "owner": "Autoscaler"}})
    for second in range(20):
        world.step(float(second))
    assert (world.decided("demo"), world.decided("owned"), world.changed) == ({}, {}, [])


def test_service_wakes_by_its_last_revision_when_its_preset_is_gone() -> None:
    world = World(demo={"replicas": 1, "scaling": SCALED})
    spec = {"preset": "gone", "unified": {"replicas": 1, "scaling": SCALED}}
    stored = changed({"metadata": {"name": "demo", "uid": "demo"}, "spec": spec, "status": {"revision": "r"}})
    stored["metadata"] |= {"resourceVersion": "2"}
    world.cache.written(KIND, stored)
    world.step(0.0)
    assert world.decided("demo") == {}
    metadata = {"name": "demo-r", "namespace": "default", "uid": "demo-r", "resourceVersion": "3"}
    labels = {LABEL_SERVICE: "demo", LABEL_REVISION: "r"}
    kept = {**stored["spec"], "preset": "none"}
    world.cache.written(
        "ControllerRevision", {"metadata": metadata | {"labels": labels}, "revision": 1, "data": {"spec": kept}}
    )
    for second in range(1, 20):
        world.step(float(second))
    assert world.decided("demo") == {"unified": 0}
    world.step(21.0, demo=3)
    assert world.decided("demo") == {"unified": 1}


def test_deleted_service_is_forgotten() -> None:
    world = World(demo={"replicas": 1, "scaling": SCALED})
    world.step(0.0)
    world.cache.drop(KIND, "default", "demo")
    world.step(1.0)
    assert world.decided("demo") == {}


def test_namespace_budget_limits_what_is_granted() -> None:
    one_gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    world = World(2.0, a={"replicas": 1, "scaling": SCALED, **one_gpu}, b={"replicas": 1, "scaling": SCALED, **one_gpu})
    world.step(0.0)
    for second in range(1, 4):
        world.now_s = float(second)
        load = ServiceLoad(queued_requests=50, queued_tokens=9_000_000)
        world.scaling.step({"http://gateway": GatewayLoads(1.0, {"default/a": load, "default/b": load})})
    assert (world.decided("a"), world.decided("b")) == ({"unified": 1}, {"unified": 1})


def test_namespace_budget_is_split_by_need_when_roles_can_switch() -> None:
    """Three GPUs for five engines that the load needs: the split follows the need, and the sum stays."""
    world = World(3.0)
    role = {"scaling": {"minReplicas": 1, "maxReplicas": 4}, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    roles = {"prefill": {**role, "replicas": 1}, "decode": {**role, "replicas": 2}}
    stored = changed({"metadata": {"name": "pair", "uid": "pair"}, "spec": {"unified": None, **roles}})
    stored["metadata"] |= {"resourceVersion": "1"}
    world.cache.written(KIND, stored)
    for name, of in {"p0": "prefill", "d0": "decode", "d1": "decode"}.items():
        pod = engine("pair")
        pod["metadata"] |= {"name": name, "uid": name, "labels": {**pod["metadata"]["labels"], LABEL_ROLE: of}}
        world.cache.written("Pod", pod)
    world.scaling.update(("default", "pair"), stored)
    engines = {"default/d0": EngineLoad("decode", 7), "default/d1": EngineLoad("decode", 1, 512)}
    for second in range(3):
        world.now_s = float(second)
        load = ServiceLoad(queued_tokens=900_000, running_requests=8, engines=engines)
        world.scaling.step({"http://gateway": GatewayLoads(1.0, {"default/pair": load})})
    assert world.decided("pair") == {"prefill": 2, "decode": 1}
    assert world.scaling.loads(("default", "pair")) == {"d0": 7.0, "d1": 2.0}


def test_numbers_stay_and_an_event_says_so_when_no_gateway_answers() -> None:
    world = World(demo={"replicas": 2, "scaling": SCALED})
    world.step(0.0)
    for second in range(1, int(UNHEARD_S) + 30):
        world.now_s = float(second)
        world.scaling.step({})
    assert world.decided("demo") == {"unified": 2}
    assert [reason for reason, _ in world.events] == ["NoGatewayReports"]


@pytest.mark.parametrize("bad", ["", "host", "host:0", "host:99999", "a:b:1", "[::1]"])
def test_gateway_address_is_refused_when_it_has_no_port(bad: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        host_and_port(bad)


def test_gateway_address_may_be_a_name_or_ipv6() -> None:
    assert [host_and_port("gateway.ns.svc:8081"), host_and_port("[::1]:80")] == [("gateway.ns.svc", 8081), ("::1", 80)]


REPORT = b'{"started_s": 1.0, "services": {"default/demo": {"requests": 5, "engines": {"e": {"running": 2}}}}}'


@pytest.mark.parametrize(
    ("body", "is_read"),
    [
        pytest.param(REPORT, True, id="a report"),
        pytest.param(b'{"services": {}}', False, id="no report"),
        pytest.param(b"x" * 5_000_000, False, id="too long"),
        pytest.param(b"[" * 100_000, False, id="too deep"),
        pytest.param(None, False, id="an error"),
    ],
)
async def test_gateways_that_answer_anything_else_are_left_out(body: bytes | None, is_read: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=500) if body is None else web.Response(body=body)

    app = web.Application()
    app.router.add_get(SCALING_PATH, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            found = await GatewayLoadReader(session, [f"127.0.0.1:{port}", "127.0.0.1:1"]).read()
    finally:
        await runner.cleanup()
    assert set(found) == ({f"http://127.0.0.1:{port}"} if is_read else set())
    if is_read:
        assert found[f"http://127.0.0.1:{port}"].services["default/demo"].engines["e"].running == 2
