"""Defines the policies by which a sequence loses tokens of its KV cache, and checks their options. No torch here."""

from dataclasses import dataclass

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_contract.engine_options import EngineOptions, KVPolicyName

NUM_SINKS = 4
"""First tokens that StreamingLLM never evicts (Xiao et al. 2023, arXiv 2309.17453)."""
OBSERVATION_WINDOW = 64
"""Last tokens of a prompt whose attention chooses what SnapKV keeps; they are kept, too (Li et al. 2024, arXiv
2404.14469).
"""

SNAPKV_KERNELS: dict[KVPolicyName, int] = {"snapkv": 5, "snapkv-wide": 63}
"""Tokens over which SnapKV averages attention, so that it keeps neighbours of what is attended to: its authors' number,
and that of the first stage of RocketKV (Behnam et al. 2025, arXiv 2502.14051), which keeps whole phrases.
"""

_LEAST_BUDGETS: dict[KVPolicyName, tuple[int, str]] = {
    "streaming-llm": (NUM_SINKS + 1, f"{NUM_SINKS} sinks and a window after them"),
    "h2o": (2, "the newest tokens in one half, and heavy hitters in the other"),
    **dict.fromkeys(
        SNAPKV_KERNELS,
        (OBSERVATION_WINDOW + 1, f"the {OBSERVATION_WINDOW} tokens of its observation window, and others"),
    ),
}
"""The least budget of each policy, and what it has room for."""


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """A policy of eviction, and the tokens that a sequence retains under it."""

    name: KVPolicyName
    budget: int

    @property
    def num_observed(self) -> int:
        """The last tokens of a prompt that must be computed in one pass, because their queries choose what is kept."""
        return OBSERVATION_WINDOW if self.name in SNAPKV_KERNELS else 1

    @property
    def longest_observed(self) -> int:
        """The most tokens of that pass: they begin with a block of the prefix cache."""
        return self.num_observed + BLOCK_SIZE_TOKENS - 1 if self.num_observed > 1 else 1

    @property
    def evicts_in_decode(self) -> bool:
        """True if the budget holds for prompt and output together, not for the prompt alone."""
        return self.name not in SNAPKV_KERNELS

    @property
    def counts_attention(self) -> bool:
        """True if the attention of all queries is summed up, so that no token of a prompt may come from a cache."""
        return self.name == "h2o"


def kv_policy(name: KVPolicyName, budget: int | None) -> KVPolicy | None:
    """Returns a policy of eviction; None for "full". Raises ValueError if it has no budget, or one that is too small.

    The message begins with the name of the field or option that is at fault.
    """
    if name == "full":
        return None
    if budget is None:
        raise ValueError(f"kv_budget is missing, and kv_policy {name!r} needs one: say how many tokens are kept")
    least, room = _LEAST_BUDGETS[name]
    if budget < least:
        raise ValueError(
            f"kv_budget is {budget}; with kv_policy {name!r} it must be at least {least}, for it has room for {room}"
        )
    return KVPolicy(name, budget)


def policy_of_request(name: KVPolicyName | None, budget: int | None, options: EngineOptions) -> KVPolicy | None:
    """Returns the policy of a request with these fields, None for those that it has not; None if nothing is evicted.

    Raises ValueError as `kv_policy` does, or if the request has a budget and no policy.
    """
    chosen = options.kv_policy if name is None else name
    if chosen == "full" and budget is not None:
        raise ValueError("kv_budget needs a policy, and kv_policy 'full' evicts nothing: choose one, or leave it out")
    if chosen == "h2o" and options.kv_policy != "h2o":
        raise ValueError(
            "kv_policy 'h2o' sums attention up in memory that only an engine with --kv-policy h2o has: choose another"
        )
    return kv_policy(chosen, options.kv_budget if budget is None else budget)


def kv_policy_fault(options: EngineOptions) -> str | None:
    """Says why the options of the policy do not go together, or not with others; None if they do."""
    try:
        policy = kv_policy(options.kv_policy, options.kv_budget)
    except ValueError as error:
        return f"--kv-policy {options.kv_policy}: {error}"
    if policy is None:
        return None
    if options.pipeline_parallel_size > 1:
        return (
            f"--kv-policy {policy.name}: the stages of a pipeline evict no tokens yet: set --pipeline-parallel-size 1"
        )
    return None


def room_fault(policy: KVPolicy, room: int) -> str | None:
    """Says that a pass has no room for the observed tokens, if it has room for so many beside all other sequences."""
    if policy.longest_observed <= room:
        return None
    return (
        f"kv_policy {policy.name!r} needs the last {policy.longest_observed} tokens of a prompt in one pass, and there "
        f"is room for {room} beside all other sequences: raise --max-num-batched-tokens"
    )
