"""The errors that a client receives when its request fails at the endpoints or in the gateway."""

from mini_infer_gateway.fleet.registry import no_endpoint
from mini_infer_gateway.pipeline.poison_requests import KILLS_LIMIT, RETENTION_S
from mini_infer_gateway.pipeline.retries import AttemptError, Failure
from mini_infer_web.api_errors import ApiError

INTERNAL_ERROR = ApiError(500, "an error of the gateway's own; its log says which", code="internal")


def endpoint_failed(detail: str) -> ApiError:
    """Returns the error that ends an event stream whose endpoint failed, if no endpoint can continue it."""
    return ApiError(502, f"the endpoint failed in the middle of this answer: {detail}", code="endpoint_failed")


def endpoints_ended(model: str, kills: int, detail: str = "") -> ApiError:
    """Returns the 502 for a request that ended engines. OpenAI's and Anthropic's clients do not retry it."""
    return ApiError(
        502,
        f"{kills} endpoints of model {model!r} ended while they had this request, so it is not tried on another"
        f"{detail and f' ({detail})'}; the same request is refused for {RETENTION_S:g} s",
        code="endpoints_ended",
        headers={"x-should-retry": "false"},
    )


def attempts_failed(model: str, kills: int, last: AttemptError) -> ApiError:
    """Returns the error for a request whose last attempt failed before its first byte.

    `kills` is the number of engines that the request has ended.
    """
    if last.failure is Failure.TIMEOUT:
        message = f"an endpoint of model {model!r} did not answer in time: {last}"
        return ApiError(504, message, code="endpoint_timeout")
    if last.failure is Failure.MALFORMED:
        message = f"an endpoint of model {model!r} answered with something that is no answer: {last}"
        return ApiError(502, message, code="endpoint_malformed")
    if kills >= KILLS_LIMIT:
        return endpoints_ended(model, kills, str(last))
    if last.failure is Failure.DIED:
        message = f"the engine of an endpoint of model {model!r} has ended ({last}); try again shortly"
        return ApiError(503, message, code="engine_dead", headers={"retry-after": "1"})
    return no_endpoint(model, str(last))
