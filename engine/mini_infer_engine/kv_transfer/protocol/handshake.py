"""Decides whether two engines can exchange keys and values, from their descriptions alone. Pure functions."""

from mini_infer_engine.kv_transfer.layout import layout_fault, layout_refusal
from mini_infer_engine.kv_transfer.protocol.wire import Party


def party_fault(party: Party) -> str:
    """Returns the contradiction in an engine's description, or an empty string. `wire` has checked single values."""
    if fault := layout_fault(party.layout):
        return fault
    if len(party.where.ranks) != party.layout.tp_size:
        return f"there are {len(party.where.ranks)} addresses of ranks, and tp_size is {party.layout.tp_size}"
    return ""


def handshake_refusal(ours: Party, theirs: Party) -> str:
    """Returns the reason why two engines cannot exchange keys and values, or an empty string if they can.

    Roles are not compared: they may change while engines run.
    """
    if ours.version != theirs.version:
        return f"this engine speaks version {ours.version} of KV transfer and that one {theirs.version}: update one"
    if fault := party_fault(theirs):
        return f"that engine describes itself wrongly: {fault}"
    if ours.weights != theirs.weights:
        return f"the weights differ ({ours.weights} here, {theirs.weights} there): serve the same model at both"
    if not set(ours.where.transport.split("+")) & set(theirs.where.transport.split("+")):
        return (
            f"this engine moves keys and values by {ours.where.transport}, that one by {theirs.where.transport}: "
            "choose the same --kv-transport"
        )
    return layout_refusal(ours.layout, theirs.layout)
