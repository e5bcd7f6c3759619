"""The kubelet ends an engine by its probes, or leaves it: one that refuses, hangs, stalls or is slow."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest

from mini_infer_operator.objects.render import render
from mini_infer_operator.observe import Observed
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.plan import make_plan
from tests.operator.objects.test_render import NOW, STORED
from tests.support.services import changed

LIMIT_S = 600.0


@dataclass(frozen=True)
class Answer:
    """The answer to a probe that was sent at some time: after so many seconds, and whether it is 200."""

    after_s: float = 0.0
    ok: bool = True


def refuses(sent_s: float) -> Answer:
    return Answer(ok=False)


def hangs(sent_s: float) -> Answer:
    return Answer(after_s=inf)


def stalls_for(seconds: float) -> Callable[[float], Answer]:
    return lambda sent_s: Answer(after_s=max(0.0, seconds - sent_s))


def answers_after(seconds: float) -> Callable[[float], Answer]:
    return lambda sent_s: Answer(after_s=seconds)


def failed_s(probe: dict[str, Any], engine: Callable[[float], Answer]) -> float | None:
    """Returns when the kubelet acts on a probe; None if it never does. It sends one at a time, one a period."""
    now_s, failures = 0.0, 0
    while now_s < LIMIT_S:
        answer = engine(now_s)
        in_time = answer.after_s <= probe["timeoutSeconds"]
        failures = 0 if in_time and answer.ok else failures + 1
        end_s = now_s + min(answer.after_s, probe["timeoutSeconds"])
        if failures == probe["failureThreshold"]:
            return end_s
        now_s = max(now_s + probe["periodSeconds"], end_s)
    return None


def engine_container() -> dict[str, Any]:
    service = parse_service(changed(STORED))
    manifests = render(service, make_plan(service, Observed(default_image="engine:1"), NOW), {}, None)
    (pods,) = (m["spec"]["template"] for m in manifests if m["kind"] == "Deployment")
    (container,) = pods["spec"]["containers"]
    return dict(container)


@pytest.mark.usefixtures("everything_works")
@pytest.mark.parametrize(
    ("engine", "ended_s", "unready_s"),
    [
        (refuses, 10.0, 4.0),
        (hangs, 60.0, 30.0),
        (stalls_for(25.0), None, None),
        (stalls_for(45.0), None, 30.0),
        (answers_after(9.0), None, None),
        (answers_after(19.0), None, 30.0),
    ],
    ids=["refuses", "hangs", "stalls for 25 s", "stalls for 45 s", "answers after 9 s", "answers after 19 s"],
)
def test_an_engine_is_ended_when_it_refuses_or_is_silent_for_a_minute(
    engine: Callable[[float], Answer], ended_s: float | None, unready_s: float | None
) -> None:
    container = engine_container()
    assert failed_s(container["livenessProbe"], engine) == ended_s
    assert failed_s(container["readinessProbe"], engine) == unready_s
