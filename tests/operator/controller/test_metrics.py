from datetime import UTC, datetime

import pytest

from mini_infer_contract import metrics as names
from mini_infer_operator.controller.metrics import OperatorMetrics, plural_of
from mini_infer_operator.status import progress_ended
from mini_infer_web.kubernetes_api import ApiError

NOON = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def value(metrics: OperatorMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_reconciles_are_counted_by_result() -> None:
    metrics = OperatorMetrics()
    assert value(metrics, names.OPERATOR_RECONCILES, result="error") == 0
    metrics.pass_ended(0.1, None)
    metrics.pass_ended(0.2, ApiError(403, "Forbidden", "no"))
    metrics.pass_ended(0.3, ApiError(500, "", "?"))
    metrics.pass_ended(0.4, TimeoutError())
    assert value(metrics, names.OPERATOR_RECONCILES, result="ok") == 1
    assert value(metrics, names.OPERATOR_RECONCILES, result="error") == 3
    reasons = ("Forbidden", "ApiError", "TimeoutError")
    assert [value(metrics, names.OPERATOR_RECONCILE_ERRORS, reason=reason) for reason in reasons] == [1, 1, 1]
    assert value(metrics, f"{names.OPERATOR_RECONCILE_DURATION}_sum") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("method", "path", "query", "verb", "kind"),
    [
        ("GET", "/api/v1/pods", {}, "list", "pods"),
        ("GET", "/api/v1/pods", {"watch": "true"}, "watch", "pods"),
        ("GET", "/apis/apps/v1/namespaces/n/deployments", {}, "list", "deployments"),
        ("GET", "/apis/apps/v1/namespaces/n/deployments/d", {}, "get", "deployments"),
        (
            "PATCH",
            "/apis/serving.mini-infer.io/v1alpha1/namespaces/n/inferenceservices/i/status",
            {},
            "patch",
            "inferenceservices",
        ),
        ("POST", "/api/v1/namespaces/n/events", {}, "create", "events"),
        ("DELETE", "/api/v1/namespaces/n/services/s", {}, "delete", "services"),
        ("GET", "/openapi/v3/apis/serving.mini-infer.io/v1alpha1", {}, "get", ""),
    ],
)
def test_api_requests_are_counted_by_verb_kind_and_status(
    method: str, path: str, query: dict[str, str], verb: str, kind: str
) -> None:
    metrics = OperatorMetrics()
    metrics.request_seen(method, path, query, 200)
    metrics.request_seen(method, path, query, None)
    if kind:
        assert plural_of(path)[0] == kind
        assert value(metrics, names.OPERATOR_API_REQUESTS, verb=verb, kind=kind, status="200") == 1
        assert value(metrics, names.OPERATOR_API_REQUESTS, verb=verb, kind=kind, status="") == 1


def test_gauges_are_read_at_each_scrape() -> None:
    metrics, depth = OperatorMetrics(), 1.0
    metrics.gauges((names.OPERATOR_QUEUE_DEPTH, "help", (), lambda: {(): depth}))
    assert value(metrics, names.OPERATOR_QUEUE_DEPTH) == 1
    depth = 2.0
    assert f"{names.OPERATOR_QUEUE_DEPTH} 2.0".encode() in metrics.exposition()


def progressing(status: str, reason: str, since: str = "2026-01-01T11:59:00Z") -> dict[str, object]:
    return {"conditions": [{"type": "Progressing", "status": status, "reason": reason, "lastTransitionTime": since}]}


def test_a_rollout_ends_when_nothing_is_left_to_do() -> None:
    rolling, complete = progressing("True", "RollingOut"), progressing("False", "Complete", "2026-01-01T12:00:00Z")
    assert progress_ended(rolling, complete, NOON) == ("RollingOut", 60.0)
    assert progress_ended(rolling, rolling, NOON) is None
    assert progress_ended(complete, complete, NOON) is None
    assert progress_ended({}, complete, NOON) is None
    for text in ("soon", "2026-01-01", ""):  # Users may be allowed to write a status.
        assert progress_ended(progressing("True", "RollingOut", text), complete, NOON) is None
    assert progress_ended(rolling, progressing("False", "Refused"), NOON) is None
