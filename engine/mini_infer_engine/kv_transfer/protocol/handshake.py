"""Whether keys and values of one engine mean the same at another: pure, on what the two say of themselves."""

from mini_infer_engine.kv_transfer.layout import layout_fault, layout_refusal
from mini_infer_engine.kv_transfer.protocol.wire import Party


def party_fault(party: Party) -> str:
    """Returns what an engine says of itself that cannot be, or an empty string. Single values are checked by `wire`."""
    if fault := layout_fault(party.layout):
        return fault
    if len(party.where.ranks) != party.layout.tp_size:
        return f"there are {len(party.where.ranks)} addresses of ranks, and tp_size is {party.layout.tp_size}"
    return ""


def handshake_refusal(ours: Party, theirs: Party) -> str:
    """Why nothing may move between them; empty: it may. Roles are no matter: they change while engines run."""
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
