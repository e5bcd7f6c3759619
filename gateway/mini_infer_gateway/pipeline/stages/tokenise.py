"""Tokenises a request's prompts, and describes the request to routing and to the queue."""

from math import inf

from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.canary.session import session_of
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.prompts.image_bytes import image_bytes
from mini_infer_gateway.routing.base import RoutingRequest

BYTES_PER_TOKEN = 4
"""Bytes per token, to estimate the tokens of a prompt that was not tokenised."""


async def tokenise(call: Call, serving: Serving) -> None:
    """Computes the prompts' block keys, and builds the `RoutingRequest`.

    Raises ApiError 400 if no endpoint can take the prompt.
    """
    fleet, began_s = serving.fleet, serving.clock()
    prompts = (
        await serving.tokenizers.keys(
            call.row.prompts,
            call.fields,
            len(call.body),
            fleet.assets_revisions(call.endpoints),
            fleet.max_prompt_tokens(call.endpoints),
            abandoned=lambda: call.exchange.abandoned,
        )
        if call.row.prompts
        else {}
    )
    call.reservation.settle(len(call.body))
    if prompts:
        serving.metrics.tokenized(serving.clock() - began_s)
    estimate = 0 if call.boundary or prompts else max(0, len(call.body) - image_bytes(call.fields)) // BYTES_PER_TOKEN
    client_timeout_s = min(call.queue_timeout_s, call.first_token_target_s)
    order_timeout_s = client_timeout_s if call.client.orders_by_deadline else inf
    tokens = max((prompt.tokens for prompt in prompts.values()), default=estimate)
    call.trace.tokenized(call.fields, tokens, serving.clock())
    call.request = RoutingRequest(
        call.placed_as,
        tokens,
        prompts,
        may_split=bool(call.row.continued and prompts) and all(len(keys.chains) == 1 for keys in prompts.values()),
        order=serving.flow.order(call.priority, call.arrived_s, order_timeout_s),
        flow=call.client.flow,
        session=session_of(call.scope["headers"], call.fields, call.request_id) if call.placed_as == call.model else "",
    )
