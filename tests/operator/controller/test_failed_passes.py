import pytest

from mini_infer_operator.controller.failed_passes import REPORT_AFTER, FailedPasses, error_message
from mini_infer_operator.observe import Observed
from mini_infer_operator.resource import InferenceService
from mini_infer_web.kubernetes_api import ApiError
from tests.operator.test_reconcile import MemoryBackend, settle
from tests.support.services import changed


class FailingBackend(MemoryBackend):
    error: Exception | None = None

    async def observe(self, service: InferenceService) -> Observed:
        if self.error is not None:
            raise self.error
        return await super().observe(service)


def http_error() -> ApiError:
    error = ApiError(500, "InternalError", 'failed calling webhook "policy.example.org": connection refused')
    error.add_note("PATCH /apis/apps/v1/namespaces/default/deployments/demo")
    return error


async def test_a_failure_is_reported_when_passes_fail_repeatedly_and_cleared_when_one_succeeds() -> None:
    backend = FailingBackend(changed({}))
    await settle(backend)
    before = (backend.stored or {})["status"]
    passes = FailedPasses(lambda key: backend)
    backend.error = http_error()
    for _ in range(REPORT_AFTER - 1):
        with pytest.raises(ApiError):
            await passes.reconcile("demo")
    assert (backend.stored or {})["status"] == before  # a failure that passes is not worth an alarm
    backend.events.clear()
    for _ in range(3):
        with pytest.raises(ApiError):
            await passes.reconcile("demo")
    assert backend.ready() == ("False", "ApiError")
    message = (backend.stored or {})["status"]["conditions"][0]["message"]
    assert (
        "PATCH /apis/apps/v1/namespaces/default/deployments/demo: 500 InternalError: failed calling webhook" in message
    )
    after = (backend.stored or {})["status"]
    assert (after["readyReplicas"], after["revision"]) == (before["readyReplicas"], before["revision"])
    assert [(kind, reason) for kind, reason, _ in backend.events] == [("Warning", "ApiError")]
    backend.error = None
    await passes.reconcile("demo")
    assert backend.ready() == ("True", "AllReplicasReady")
    backend.error = http_error()
    with pytest.raises(ApiError):
        await passes.reconcile("demo")
    assert backend.ready() == ("True", "AllReplicasReady")  # counted anew


def test_an_error_is_named_by_its_class_when_it_has_no_message() -> None:
    assert error_message(TimeoutError()).endswith("left as they are: TimeoutError")
