"""Answers a request that failed: with an error response, with an error event, or by cutting the connection."""

import logging

from mini_infer_gateway.http.asgi import ClientDisconnectedError
from mini_infer_gateway.http.upstream import UpstreamError
from mini_infer_gateway.metrics import Outcome, outcome_of
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.errors import INTERNAL_ERROR
from mini_infer_web.api_errors import ApiError

log = logging.getLogger(__name__)


async def answer_failure(call: Call, error: Exception) -> None:
    """Answers a request that ended with `error`, and records its outcome.

    Raises `error` again if it is the gateway's own and an answer has begun: the connection is cut then, because the
    client must not take half an answer for a whole one.
    """
    exchange = call.exchange
    if isinstance(error, ApiError):
        call.failed(error.status, outcome_of(error.status), error.message)
        await exchange.send_error(error)
    elif isinstance(error, UpstreamError):
        call.failed(exchange.status, Outcome.BROKE, str(error))
        log.warning("request %s of %s broke off: %s", call.request_id, call.model, error)
    elif not isinstance(error, ClientDisconnectedError):
        call.failed(500, Outcome.INTERNAL)
        log.error("request %s of %s: an error of the gateway's own", call.request_id, call.model, exc_info=error)
        if exchange.status:
            raise error
        await exchange.send_error(INTERNAL_ERROR)
    elif expired := exchange.expired:
        call.failed(expired.status, outcome_of(expired.status), expired.message)
        await exchange.send_error(expired)
    else:
        call.outcome = Outcome.CLIENT_DISCONNECTED
