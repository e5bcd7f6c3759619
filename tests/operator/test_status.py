from datetime import UTC, datetime
from typing import Any

import pytest

from mini_infer_operator.observe import Failure, Observed, ObservedWorkload
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.plan import make_plan
from mini_infer_operator.resource import REASONS, InferenceServiceStatus, ModelCacheStatus, Reason
from mini_infer_operator.status import PermanentFailure, invalid_status, name_turn, service_status
from tests.support.services import changed

NOON = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
LATER = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)


def status(
    *seen: tuple[str, int, int],
    replicas: int = 2,
    failures: tuple[Failure, ...] = (),
    failure: PermanentFailure | None = None,
    previous: dict[str, Any] | None = None,
    now: datetime = NOON,
) -> dict[str, Any]:
    """Of the demo service; `seen` is (revision, replicas, available), "new" stands for the current one."""
    service = parse_service(changed({"metadata": {"generation": 3}, "spec": {"unified": {"replicas": replicas}}}))
    current = make_plan(service, Observed(), NOON).workloads[0].revision
    workloads = [ObservedWorkload("unified", current if r == "new" else r, n, a, a) for r, n, a in seen]
    observed = Observed(workloads, failures)
    plan = make_plan(service, observed, now)
    return service_status(service, observed, plan, failure, url="http://x", previous=previous or {}, now=now)


def conditions(value: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in value["conditions"]}


def test_status_names_the_implementation_until_another_is_reported_when_no_engine_is_ready() -> None:
    service = parse_service(changed({"spec": {"unified": {"replicas": 1}}}))

    def report(model_impl: str | None, previous: dict[str, Any]) -> Any:
        observed = Observed(model_impl=model_impl)
        plan = make_plan(service, observed, NOON)
        return service_status(service, observed, plan, None, url=None, previous=previous, now=NOON)

    assert "modelImpl" not in report(None, {})
    first = report("transformers", {})
    assert first["modelImpl"] == report(None, first)["modelImpl"] == "transformers"
    assert report("native", first)["modelImpl"] == "native"


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (None, "0 of 1 engines are ready"),
        (
            ModelCacheStatus(claim="weights", state="Waiting"),
            "0 of 1 engines are ready; the model is being copied onto claim weights",
        ),
        (
            ModelCacheStatus(
                claim="weights", state="Copying", copied_bytes=2 * 10**9, total_bytes=8 * 10**9, percent=25
            ),
            "0 of 1 engines are ready; the model is being copied onto claim weights (25 % of 8.0 GB)",
        ),
        (ModelCacheStatus(claim="weights", state="Ready", percent=100), "0 of 1 engines are ready"),
    ],
)
def test_the_message_says_how_far_the_copy_is_when_engines_wait_for_it(
    cache: ModelCacheStatus | None, message: str
) -> None:
    service = parse_service(changed({"spec": {"unified": {"replicas": 1}}}))
    observed = Observed(model_cache=cache)
    plan = make_plan(service, observed, NOON)
    found = service_status(service, observed, plan, None, url=None, previous={}, now=NOON)
    assert next(c["message"] for c in found["conditions"] if c["type"] == "Ready") == message
    assert found.get("modelCache") == (None if cache is None else cache.model_dump(by_alias=True, exclude_none=True))


OLD_AND_NEW = (("old", 2, 2), ("new", 1, 0))


@pytest.mark.parametrize(
    ("seen", "replicas", "ready", "available", "progressing"),
    [
        ((), 2, ("False", "Starting"), ("False", "NoneAvailable"), ("True", "Starting")),
        ((("new", 2, 1),), 2, ("False", "Starting"), ("True", "Available"), ("True", "Starting")),
        ((("new", 2, 2),), 2, ("True", "AllReplicasReady"), ("True", "Available"), ("False", "Complete")),
        ((("new", 3, 3),), 2, ("True", "ScalingDown"), ("True", "Available"), ("True", "ScalingDown")),
        ((("new", 2, 3),), 2, ("True", "ScalingDown"), ("True", "Available"), ("True", "ScalingDown")),
        ((("new", 2, 2),), 0, ("True", "ScalingDown"), ("True", "Available"), ("True", "ScalingDown")),
        (OLD_AND_NEW, 2, ("False", "RollingOut"), ("True", "Available"), ("True", "RollingOut")),
        ((("old", 1, 1), ("new", 2, 2)), 2, ("False", "RollingOut"), ("True", "Available"), ("True", "RollingOut")),
        ((("old", 0, 0), ("new", 2, 2)), 2, ("False", "RollingOut"), ("True", "Available"), ("True", "RollingOut")),
        ((("new", 0, 0),), 0, ("True", "ScaledToZero"), ("False", "NoneAvailable"), ("False", "Complete")),
    ],
)
def test_conditions_by_observed_engines(seen: Any, replicas: int, ready: Any, available: Any, progressing: Any) -> None:
    value = status(*seen, replicas=replicas)
    expected = {"Ready": ready, "Available": available, "Progressing": progressing}
    if progressing[0] == "True":
        expected["Reconciling"] = progressing
    assert conditions(value) == expected
    assert (value["observedGeneration"], value["model"], value["url"]) == (3, "demo", "http://x")
    assert value["readyReplicas"] == sum(available for _, _, available in seen)


@pytest.mark.parametrize(
    ("seen", "replicas", "message"),
    [
        ((("new", 1, 1),), 2, "1 of 2 engines are ready"),
        ((("new", 2, 2),), 1, "1 of 1 engines are ready; 1 more is being stopped"),
        ((("new", 3, 3),), 0, "0 of 0 engines are ready; 3 more are being stopped"),
        (OLD_AND_NEW, 2, "0 of 2 engines are ready; 2 of older revisions still answer"),
    ],
)
def test_status_messages_never_count_more_ready_engines_than_desired(seen: Any, replicas: int, message: str) -> None:
    assert status(*seen, replicas=replicas)["conditions"][0]["message"] == message


def test_the_reason_differs_when_an_engine_was_lost_or_never_started() -> None:
    whole = status(("new", 2, 2))
    lost = status(("new", 2, 1), previous=whole)
    assert conditions(lost)["Ready"] == ("False", "ReplacingEngines")
    assert lost["conditions"][0]["message"] == "1 of 2 engines are ready; 1 was lost and is being replaced"
    assert conditions(status(("new", 2, 0), previous=lost))["Ready"] == ("False", "ReplacingEngines")
    edited = {**whole, "conditions": [{**c, "observedGeneration": 2} for c in whole["conditions"]]}
    assert conditions(status(("new", 2, 1), previous=edited))["Ready"] == ("False", "Starting")


def test_status_quotes_failures_and_takes_the_first_as_reason() -> None:
    failures = (
        Failure("ImagePullFailed", "pod-1: ImagePullBackOff: no such image"),
        Failure("Unschedulable", "pod-2: no GPU"),
    )
    value = status(("new", 2, 0), failures=failures)
    assert conditions(value)["Ready"] == ("False", "ImagePullFailed")
    message = value["conditions"][0]["message"]
    assert message == "0 of 2 engines are ready; pod-1: ImagePullBackOff: no such image; pod-2: no GPU"


def test_status_says_that_older_engines_answer_when_an_edit_fails() -> None:
    value = status(("old", 2, 2), ("new", 1, 0), failures=(Failure("EngineCrashing", "pod-1: the engine ended"),))
    assert value["readyReplicas"] == 2
    message = value["conditions"][0]["message"]
    assert message == "0 of 2 engines are ready, 2 of older revisions still answer; pod-1: the engine ended"


def test_status_is_stalled_when_a_failure_is_permanent() -> None:
    value = status(("new", 2, 2), failure=PermanentFailure("Refused", "Deployment x: no"))
    assert conditions(value)["Ready"] == conditions(value)["Progressing"] == ("False", "Refused")
    assert conditions(value)["Stalled"] == ("True", "Refused")
    assert conditions(value)["Available"] == ("True", "Available")
    assert "Reconciling" not in conditions(value)


def test_transition_times_change_only_when_a_condition_flips() -> None:
    before = status(("new", 2, 1))
    after = status(("new", 2, 2), previous=before, now=LATER)
    times = {c["type"]: c["lastTransitionTime"] for c in after["conditions"]}
    assert times == {
        "Ready": "2026-01-01T12:30:00Z",
        "Available": "2026-01-01T12:00:00Z",
        "Progressing": "2026-01-01T12:30:00Z",
    }
    assert status(("new", 2, 2), previous=after, now=datetime(2027, 1, 1, tzinfo=UTC)) == after


def test_status_keeps_engine_counts_when_the_spec_is_invalid() -> None:
    before = status(("new", 2, 2))
    after = invalid_status(4, "spec.x: there is no such field", previous=before, now=LATER)
    assert conditions(after)["Ready"] == conditions(after)["Progressing"] == ("False", "InvalidSpec")
    assert conditions(after)["Stalled"] == ("True", "InvalidSpec")
    assert conditions(after)["Available"] == ("True", "Available")
    assert (after["observedGeneration"], after["readyReplicas"]) == (4, 2)
    assert invalid_status(4, "spec.x: there is no such field", previous=after, now=NOON) == after
    InferenceServiceStatus.model_validate(after)


def test_status_reasons_are_a_closed_set() -> None:
    seen = {c["reason"] for value in (status(), status(("new", 2, 2))) for c in value["conditions"]}
    assert seen <= REASONS
    assert all(reason.isidentifier() for reason in REASONS)


def test_serving_engines_stay_when_the_progress_deadline_passes() -> None:
    service = parse_service(changed({"spec": {"rollout": {"progressDeadlineSeconds": 60}}}))
    current = make_plan(service, Observed(), NOON).workloads[0].revision
    workloads = [
        ObservedWorkload("unified", "old", 2, 2, 2),
        ObservedWorkload("unified", current, 1, 0, 0, worked=False, progressed_at=NOON),
    ]
    observed = Observed(workloads, [Failure(Reason.IMAGE_PULL_FAILED, "pod-1: no such image")])
    plan = make_plan(service, observed, LATER)
    assert {w.revision: w.replicas for w in plan.workloads} == {"old": 2, current: 1}
    value = service_status(service, observed, plan, None, url=None, previous={}, now=LATER)
    (progressing,) = [c for c in value["conditions"] if c["type"] == "Progressing"]
    assert (progressing["status"], progressing["reason"]) == ("False", "ProgressDeadlineExceeded")
    assert "60 s" in progressing["message"]
    assert "no such image" in progressing["message"]


def test_the_owner_is_a_condition_when_several_services_claim_a_model_name() -> None:
    service = parse_service(changed({"metadata": {"namespace": "b"}, "spec": {"model": {"name": "shared"}}}))

    def reported(*claimants: str) -> tuple[str, tuple[str, str] | None, str]:
        observed = Observed(claimants=claimants)
        plan = make_plan(service, observed, NOON)
        value = service_status(service, observed, plan, None, url=None, previous={}, now=NOON)
        messages = {c["type"]: c["message"] for c in value["conditions"]}
        return value["model"], conditions(value).get("ModelNameOwned"), messages.get("ModelNameOwned", "")

    assert reported() == reported("b/demo") == ("shared", None, "")
    model, condition, message = reported("a/old", "b/demo")
    assert (model, condition) == ("b/demo", ("False", "ModelNameShared"))
    assert message == "clients that ask for shared reach a/old, which is older; this service answers to b/demo"
    model, condition, message = reported("b/demo", "c/1", "c/2", "c/3", "c/4")
    assert (model, condition) == ("shared", ("True", "ModelNameShared"))
    assert message.endswith("c/1, c/2, c/3 and 1 more claim it too")


@pytest.mark.parametrize(
    ("before", "claimants", "reason"),
    [
        (None, (), None),
        (None, ("b/demo", "c/1"), None),
        (None, ("a/old", "b/demo"), "ModelNameLost"),
        ("shared", ("a/old", "b/demo"), "ModelNameLost"),
        ("shared", ("a/old",), "ModelNameLost"),  # paused, with another name in the spec that waits
        ("b/demo", ("a/old", "b/demo"), None),
        ("b/demo", ("b/demo", "c/1"), "ModelNameGained"),
        ("b/demo", ("b/demo",), "ModelNameGained"),
        ("shared", ("b/demo",), None),
        ("another", ("b/demo",), None),
    ],
)
def test_an_event_is_recorded_when_a_model_name_changes_hands(
    before: str | None, claimants: tuple[str, ...], reason: str | None
) -> None:
    service = parse_service(changed({"metadata": {"namespace": "b"}, "spec": {"model": {"name": "shared"}}}))
    turn = name_turn(service, {} if before is None else {"model": before}, claimants)
    assert (None if turn is None else turn[0]) == reason
    if turn is not None:
        assert "shared" in turn[1]
        assert turn[2] == ("Warning" if reason == "ModelNameLost" else "Normal")
        assert ("a/old" in turn[1]) == (reason == "ModelNameLost")


PAIR = {"unified": None, "prefill": {"replicas": 1}, "decode": {"replicas": 2, "parallelism": {"tensor": 2}}}


def pair_status(*seen: tuple[str, str, int, int], failures: tuple[Failure, ...] = ()) -> dict[str, Any]:
    """Of a service with one prefill and two decode engines; `seen` is (role, revision, replicas, available)."""
    service = parse_service(changed({"metadata": {"generation": 3}, "spec": PAIR}))
    current = make_plan(service, Observed(), NOON).workloads[0].revision
    workloads = [ObservedWorkload(role, current if r == "new" else r, n, a, a) for role, r, n, a in seen]
    observed = Observed(workloads, failures)
    plan = make_plan(service, observed, NOON)
    return service_status(service, observed, plan, None, url=None, previous={}, now=NOON)


@pytest.mark.usefixtures("everything_works")
@pytest.mark.parametrize(
    ("seen", "ready", "available", "message"),
    [
        (
            [("prefill", "new", 1, 1), ("decode", "new", 2, 2)],
            ("True", "AllReplicasReady"),
            ("True", "Available"),
            "prefill 1 of 1 and decode 2 of 2 engines are ready",
        ),
        (
            [("prefill", "new", 2, 2), ("decode", "new", 1, 1)],
            ("False", "Starting"),
            ("True", "Available"),
            "prefill 1 of 1 and decode 1 of 2 engines are ready",
        ),
        (
            [("prefill", "new", 1, 1), ("decode", "new", 2, 0)],
            ("False", "Starting"),
            ("False", "NoneAvailable"),
            "prefill 1 of 1 and decode 0 of 2 engines are ready",
        ),
        (
            [("unified", "old", 2, 2), ("decode", "new", 1, 0), ("prefill", "new", 1, 1)],
            ("False", "RollingOut"),
            ("True", "Available"),
            "prefill 1 of 1 and decode 0 of 2 engines are ready; 2 of older revisions still answer",
        ),
    ],
)
def test_status_counts_roles_separately(seen: Any, ready: Any, available: Any, message: str) -> None:
    value = pair_status(*seen)
    reported = conditions(value)
    assert (reported["Ready"], reported["Available"]) == (ready, available)
    assert value["conditions"][0]["message"] == message


@pytest.mark.usefixtures("everything_works")
def test_status_has_a_column_for_each_role() -> None:
    value = pair_status(("prefill", "new", 1, 1), ("decode", "new", 2, 1), ("decode", "old", 1, 1))
    assert value["roles"] == [
        {"name": "prefill", "replicas": 1, "readyReplicas": 1, "ready": "1/1", "gpus": 0},
        {"name": "decode", "replicas": 3, "readyReplicas": 1, "ready": "1/2", "gpus": 2},
    ]
    assert (value["tensorParallel"], value["gpus"]) == ("1/2", 4)
    assert "selector" not in value


@pytest.mark.usefixtures("everything_works")
def test_a_failure_message_names_its_role_and_pod() -> None:
    failure = Failure(Reason.ENGINE_CRASHING, "pair-prefill-abc-1: the engine ended with exit code 1: no NIXL")
    value = pair_status(("prefill", "new", 1, 0), ("decode", "new", 2, 2), failures=(failure,))
    assert value["conditions"][0]["message"] == (
        "prefill 0 of 1 and decode 2 of 2 engines are ready; "
        "pair-prefill-abc-1: the engine ended with exit code 1: no NIXL"
    )
