"""Serves POST /v1/kv_hints: a client's words on a session's next request, after its last answer has ended."""

from contextlib import ExitStack

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mini_infer_apis.dialects.kv_hints import KV_HINTS_PATH
from mini_infer_engine.api.answers import KVHintsTaken
from mini_infer_engine.api.dialects.invocation import InvocationDialect
from mini_infer_engine.api.generate import bad_parameter, checked, of_key
from mini_infer_engine.api.http import client_of, json_response, request_id
from mini_infer_engine.api.images import image_inputs
from mini_infer_engine.api.key_check import GRANT
from mini_infer_engine.api.kv_lease import NO_LEASE, kv_lease
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.text.validation import ParameterError
from mini_infer_web.api_errors import ApiError, read_json_object


async def take_kv_hints(state: ApiServerState, http_request: HttpRequest) -> Response:
    """Gives the cached blocks of a session, named by its messages or prompt, the lease that the hints state."""
    raw = await state.read_json(http_request)
    with state.admission.body(len(raw)), ExitStack() as stack:
        unknown = state.unknown_fields()
        spec = InvocationDialect().parse(read_json_object(raw), unknown)
        spec = of_key(spec, http_request.scope.get("state", {}).get(GRANT), state.options)
        state.ignored_fields.note(unknown.names)
        lease = kv_lease({}, spec.kv_hints)
        if lease == NO_LEASE:
            message = f'POST {KV_HINTS_PATH} needs kv_hints: {{"done": true}}, {{"ttl_s": 20}} or {{"pin": true}}'
            raise ApiError(400, message, param="kv_hints", code="missing_required_parameter")
        model = state.admit(spec.model)
        stack.enter_context(state.admission.choices(spec.num_prompts * spec.copies))
        try:
            prompts, sampling = await checked(state, model, spec, len(raw), client_of(http_request, state.peer_secret))
            images = await image_inputs(state, prompts, spec.copies, stack)
        except ParameterError as error:
            raise bad_parameter(error) from None
        requests = state.make_requests(request_id(http_request), prompts, spec, sampling, images=images, lease=lease)
        for request in requests[:: spec.copies]:
            state.core.hint(request)
    name = spec.model or state.text.names[0]
    return json_response(KVHintsTaken("kv_hints", name, sum(map(len, prompts))))
