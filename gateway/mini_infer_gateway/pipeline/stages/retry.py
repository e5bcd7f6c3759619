"""Decides if a failed attempt is followed by another one, and reports the failure to the endpoint's record."""

from mini_infer_gateway.fleet.attempt_record import AttemptRecord
from mini_infer_gateway.http.headers import retry_after_s
from mini_infer_gateway.http.upstream import Response
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.retries import CAUSE, FREE, KILLS, Failure, allows_attempt
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.routing.base import Decision


def may_retry(call: Call, decision: Decision, failure: Failure, serving: Serving) -> bool:
    """Returns True if the request is to be retried. Call it once for each failure: True has spent budget."""
    now_s = serving.clock()
    if failure in KILLS:
        call.kills += 1
        serving.poison.killed(call.scope["path"], call.body, decision.decode.name, now_s)
    return (
        allows_attempt(call.attempts, serving.settings.max_attempts, call.kills, call.retry_until_s - now_s)
        and _others_left(call, decision, failure, serving, now_s)
        and (failure in FREE or serving.retry_budget.spend(now_s))
    )


def _others_left(call: Call, decision: Decision, failure: Failure, serving: Serving, now_s: float) -> bool:
    candidates = serving.fleet.candidates(call.endpoints, now_s)
    left = serving.router.eligible(call.request.excluding(decision), candidates)
    if failure in (Failure.OVERLOADED, Failure.UNATTAINABLE):
        # A client that can be told to come back later is not sent to an endpoint that is known to be broken.
        return any(not candidate.circuit_open for candidate in left)
    return bool(left)


def record_failure(record: AttemptRecord, failure: Failure, response: Response) -> None:
    """Reports to the endpoint's record what is wrong with a response."""
    if failure is Failure.OVERLOADED:
        record.overloaded(retry_after_s(response.header(b"retry-after")))
    elif failure is Failure.UNATTAINABLE:
        record.succeeded()
    elif failure is Failure.DRAINING:
        record.draining()
    else:
        record.failed(CAUSE[failure])
