"""Places a request: waits in the queue until an endpoint has room for it."""

from collections.abc import Callable, Sequence

from mini_infer_gateway.flow_control.controller import Placement
from mini_infer_gateway.http.asgi import ClientDisconnectedError
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.serving import Serving


async def place(call: Call, serving: Serving) -> Placement:
    """Waits for an endpoint with room; the caller must finish the placement.

    Raises ApiError if no endpoint exists, too many requests wait, or the first token cannot come in time; and
    ClientDisconnectedError.
    """
    exchange = call.exchange
    if exchange.abandoned:
        raise ClientDisconnectedError

    def leave_queue_by(fail: Callable[[Exception], None]) -> None:
        exchange.on_abandon = lambda: fail(ClientDisconnectedError())

    def endpoints_now() -> Sequence[str]:
        return serving.fleet.catalog.by_name.get(call.placed_as, call.endpoints)

    placement = await serving.flow.place(
        call.request,
        endpoints_now,
        call.request_id,
        leave_queue_by,
        give_up_s=call.arrived_s + call.queue_timeout_s,
        first_token_by_s=call.arrived_s + call.first_token_target_s,
    )
    if exchange.abandoned:
        serving.flow.finish(placement)
        raise ClientDisconnectedError
    return placement
