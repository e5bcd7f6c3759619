"""How far a copy is, as the Job's pod reports it, whatever it answers."""

from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mini_infer_operator.objects import copied_bytes
from mini_infer_operator.objects.copied_bytes import CopiedBytes, slowest_copy
from mini_infer_operator.observe import Failure

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
JOB = {"metadata": {"name": "demo-model-1", "namespace": "team-a", "creationTimestamp": "2026-01-01T11:59:55Z"}}


class _Pods:
    """An API server that has these pods."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods, self.asked = list(pods), list[tuple[str, str | None, str | None]]()

    async def list(self, kind: str, namespace: str | None, selector: str | None) -> tuple[list[dict[str, Any]], int]:
        """Returns the pods."""
        self.asked.append((kind, namespace, selector))
        return self.pods, 1


def pod(phase: str = "Running", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": {"phase": phase, **status}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"bytes": 50, "total_bytes": 200}', (50, 200)),
        (b'{"bytes": 50, "total_bytes": null}', (50, None)),
        (b'{"bytes": -1, "total_bytes": 200}', None),
        (b'{"bytes": 1e30, "total_bytes": 200}', None),
        (b'{"total_bytes": 200}', None),
        (b"no JSON", None),
    ],
)
async def test_bytes_are_read_or_left_out_when_a_pod_answers_anything(
    monkeypatch: pytest.MonkeyPatch, body: bytes, expected: tuple[int, int | None] | None
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, status=200 if request.path == "/progress" else 404)

    server = web.Server(answer)  # type: ignore[arg-type]  # as aiohttp's
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setattr(copied_bytes, "HTTP_PORT", runner.addresses[0][1])
    pods = _Pods(pod("Failed", podIP="127.0.0.2"), pod(podIP="127.0.0.1"))
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            copied = CopiedBytes(pods, session)  # type: ignore[arg-type]  # of which `list` is called
            assert (await copied.query(JOB, NOW)).progress == expected
    finally:
        await runner.cleanup()
    assert pods.asked == [("Pod", "team-a", "batch.kubernetes.io/job-name=demo-model-1")]


@pytest.mark.parametrize("pods", [(), (pod(),), (pod("Pending", podIP="127.0.0.1"),)])
async def test_there_is_no_progress_when_no_pod_runs(pods: tuple[dict[str, Any], ...]) -> None:
    async with aiohttp.ClientSession() as session:
        copied = CopiedBytes(_Pods(*pods), session)  # type: ignore[arg-type]  # of which `list` is called
        assert (await copied.query(JOB, NOW)).progress is None


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], None),
        ([(0, None), (50, 200)], (50, 200)),  # the first one waits for the other
        ([(150, 200), (50, 200)], (50, 200)),
        ([(0, None), (50, None)], (50, None)),  # a server that says no sizes
    ],
)
def test_slowest_copy_is_reported_when_pods_of_several_nodes_answer(
    answers: list[tuple[int, int | None]], expected: tuple[int, int | None] | None
) -> None:
    assert slowest_copy(answers) == expected


async def test_the_reason_is_given_when_no_pod_of_the_job_can_run() -> None:
    unbound = {"type": "PodScheduled", "status": "False", "message": 'persistentvolumeclaim "weights" not found'}
    async with aiohttp.ClientSession() as session:
        pods = _Pods(pod("Pending", conditions=[unbound]))
        (failure,) = (await CopiedBytes(pods, session).query(JOB, NOW)).failures  # type: ignore[arg-type]  # as above
    assert failure == Failure("Unschedulable", 'p: persistentvolumeclaim "weights" not found')
