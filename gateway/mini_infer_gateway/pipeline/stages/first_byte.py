"""Records the first byte of an answer: in the load ledger, the metrics, the access log and the call."""

from mini_infer_gateway.flow_control.controller import Placement
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.pipeline.stages.response_start import ResponseStart


def record_first_byte(call: Call, placement: Placement, start: ResponseStart, serving: Serving) -> None:
    """Records that the endpoint of `placement` answers, and frees the body unless a continuation needs it."""
    decision, fallback, fields = placement.decision, start.kv_fallback, call.log_fields
    is_success, is_stream = start.status < 300, call.fields.get("stream") is True
    call.trace.answered(serving.clock())
    serving.flow.first_byte(placement, is_stream, was_disaggregated=not fallback)
    if start.status < 500:
        serving.poison.answered(call.scope["path"], call.body)
    call.begin_answer(serving.retention.allows(call.continuation))

    fields.update(endpoint=decision.decode.name, prompt_tokens=placement.prompt_tokens)
    if decision.prefill:
        fields["prefill_endpoint"] = decision.prefill.name
        if is_success:
            serving.fleet.computed_for_another(decision.prefill.name, fallback)
    if fallback:
        fields["kv_fallback"] = fallback
    if is_success:
        took_s = serving.clock() - call.arrived_s
        if is_stream:
            fields["first_token_s"] = round(took_s, 6)
        serving.metrics.first_byte(call.model, took_s, placement.prompt_tokens, decision.tiers)
