"""Places a request: waits in the queue until an endpoint has room for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mini_infer_gateway.flow_control.controller import Placement
from mini_infer_gateway.http.asgi import ClientDisconnectedError
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.pipeline.stages.session_lease import announce


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

    if call.row.generates:
        await _hold(call, serving, endpoints_now, leave_queue_by)
    placement = await serving.flow.place(
        call.request,
        endpoints_now,
        call.request_id,
        leave_queue_by,
        give_up_s=call.arrived_s + call.held_s + call.queue_timeout_s,
        first_token_by_s=call.arrived_s + call.first_token_target_s,
        waits=lambda decision, wait_s: announce(call, decision, wait_s, serving),
    )
    if exchange.abandoned:
        serving.flow.finish(placement)
        raise ClientDisconnectedError
    return placement


async def _hold(
    call: Call,
    serving: Serving,
    endpoints_now: Callable[[], Sequence[str]],
    leave: Callable[[Callable[[Exception], None]], None],
) -> None:
    """Waits while the model has no engine and one is started on demand. That time counts for no limit of the queue."""
    if not serving.held.must_hold(call.placed_as, endpoints_now()):
        return
    began_s = serving.clock()
    while serving.held.must_hold(call.placed_as, endpoints_now()):
        first_token_s = call.arrived_s + call.first_token_target_s - serving.clock()
        await serving.held.hold(call.placed_as, endpoints_now, leave, min(first_token_s, call.queue_timeout_s))
    call.held_s += serving.clock() - began_s
    priority, deadline_s, number = call.request.order
    call.request = replace(call.request, order=(priority, deadline_s + call.held_s, number))
