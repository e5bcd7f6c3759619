"""An engine's options (contract.engine_options), with the checks and defaults of the engine itself. No torch here."""

import os
from pathlib import Path

import msgspec

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_engine.config.options.hf_overrides import parse_hf_overrides
from mini_infer_engine.config.options.kv_policies import kv_policy_fault
from mini_infer_engine.config.options.kv_selection import selection_fault
from mini_infer_engine.config.options.kv_tiers import tiers_fault
from mini_infer_engine.config.options.mechanisms import parse_mechanisms
from mini_infer_engine.config.options.media_limits import parse_most_images
from mini_infer_engine.config.options.speculation import speculation_of

_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Default tokens of one forward pass, by device."""


class EngineSettings(EngineOptions, frozen=True, kw_only=True):
    """The options that an engine is started with, checked."""

    def __post_init__(self) -> None:
        """Raises ValueError if `disable` names an unknown mechanism, or other options do not go together."""
        parse_mechanisms(self.disable)
        parse_hf_overrides(self.hf_overrides)
        parse_most_images(self.limit_mm_per_prompt)
        speculates = speculation_of(self) is not None
        fault = parallel_fault(self, speculates=speculates) or tiers_fault(self) or kv_policy_fault(self)
        fault = fault or selection_fault(self)
        if fault is not None:
            raise ValueError(fault)

    def resolved(self, device_type: str = "cpu") -> "ResolvedSettings":
        """Returns the settings with values that depend on the device filled in, once: memory planning and scheduling
        read the same.
        """
        values = msgspec.structs.asdict(self)
        if self.max_num_batched_tokens is None:
            values["max_num_batched_tokens"] = _BATCHED_TOKENS[device_type]
        return ResolvedSettings(**values)


class ResolvedSettings(EngineSettings, frozen=True, kw_only=True):
    """Settings whose every value is known."""

    max_num_batched_tokens: int
    """Tokens of one forward pass."""

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one prompt chunk."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens


def parallel_fault(options: EngineOptions, *, speculates: bool) -> str | None:
    """Says why the numbers of ranks and machines do not go together; None if they do."""
    if options.enable_expert_parallel and options.tensor_parallel_size == 1:
        return (
            "enable-expert-parallel deals experts out to the ranks of an engine: set tensor-parallel-size above 1, or "
            "leave it out"
        )
    if speculates and options.tensor_parallel_size > 1:
        return "tensor-parallel-size: speculative decoding runs on one device only yet: leave one of them out"
    if speculates and options.pipeline_parallel_size > 1:
        return "pipeline-parallel-size: speculative decoding runs on one device only yet: leave one of them out"
    ranks, nodes = num_ranks(options), num_nodes(options)
    shown = f"nnodes = {nodes}{' (LWS_GROUP_SIZE)' if options.nnodes is None and nodes > 1 else ''}"
    if options.data_parallel_size > 1 and nodes > 1:
        return f"data-parallel-size = {options.data_parallel_size} does not go with {shown}: run a server each"
    if ranks % nodes:
        sizes = f"tensor-parallel-size = {options.tensor_parallel_size}"
        if options.pipeline_parallel_size > 1:
            sizes += f" times pipeline-parallel-size = {options.pipeline_parallel_size}"
        return f"{shown} machines cannot share {sizes} ranks equally"
    if options.node_rank is not None and options.node_rank >= nodes:
        return f"node-rank = {options.node_rank}: with {shown} the last is {nodes - 1}"
    return None


def transfer_fault(options: EngineOptions) -> str | None:
    """Says why this engine exchanges no keys and values with others; None if it can."""
    if options.data_parallel_size > 1:
        return "--transfer-port: KV transfer needs --data-parallel-size 1, run a server for each engine"
    if options.pipeline_parallel_size > 1:
        return "--transfer-port: KV transfer needs --pipeline-parallel-size 1, stages do not transfer yet"
    return None


def trusts_code(options: EngineOptions) -> bool:
    """Returns True if the code beside a model's config.json may run: a hub may change it between two starts, but a
    folder has what its owner has read.
    """
    return options.trust_remote_code and Path(options.model).expanduser().is_dir()


def num_ranks(options: EngineOptions) -> int:
    """Returns the number of processes that share one model, each with a device of its own."""
    return options.tensor_parallel_size * options.pipeline_parallel_size


def group_name(options: EngineOptions) -> str:
    """Returns the name of the parallel group for messages, such as "tensor- and pipeline-parallel group"."""
    kinds = {"tensor": options.tensor_parallel_size, "pipeline": options.pipeline_parallel_size}
    return f"{'- and '.join(kind for kind, size in kinds.items() if size > 1)}-parallel group"


def num_nodes(options: EngineOptions) -> int:
    """Returns the number of machines of a group, from the options or LeaderWorkerSet's environment.

    Raises ValueError if the environment says another number than the options, or no number.
    """
    text = os.environ.get("LWS_GROUP_SIZE", "")
    if not text:
        return options.nnodes or 1
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"nnodes: LWS_GROUP_SIZE = {text!r} is no number of machines: unset it, or set the group's size"
        )
    if options.nnodes is not None and options.nnodes != int(text):
        raise ValueError(
            f"nnodes = {options.nnodes} does not go with LWS_GROUP_SIZE = {text}: leave --nnodes out, or unset "
            "LWS_GROUP_SIZE for an engine that is not the whole group"
        )
    return int(text)


def ranks_per_node(options: EngineOptions) -> int:
    """Returns the number of a group's ranks on each of its machines."""
    return num_ranks(options) // num_nodes(options)


def node_rank(options: EngineOptions) -> int:
    """Returns the rank of this machine in a group over several, from the options or LeaderWorkerSet's environment.

    Raises ValueError if the environment names one that there is not.
    """
    nodes = num_nodes(options)
    if nodes == 1:
        return 0
    if options.node_rank is not None:
        return options.node_rank
    text = os.environ.get("LWS_WORKER_INDEX", "0")
    if not text.isdecimal() or int(text) >= nodes:
        raise ValueError(f"LWS_WORKER_INDEX = {text!r}: with nnodes = {nodes} it is 0 to {nodes - 1}")
    return int(text)


def master_address(options: EngineOptions) -> str:
    """Returns the host at which a group over several machines meets. Raises ValueError if neither options nor
    environment say it.
    """
    address = options.master_addr or os.environ.get("LWS_LEADER_ADDRESS", "")
    if not address:
        raise ValueError(f"nnodes = {num_nodes(options)} needs --master-addr, the first machine's host name or address")
    return address
