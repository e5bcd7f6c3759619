"""Makes the scheduling policy, and the latency targets of requests that state none, from an engine's options."""

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_engine.core.request import LatencyTargets
from mini_infer_engine.core.scheduling.policy import PriorityPolicy, SchedulingPolicy
from mini_infer_engine.core.scheduling.slo_policy import SLOPolicy


def policy_of(options: EngineOptions, *, token_budget: int, chunk_alignment: int) -> SchedulingPolicy:
    """Returns a new policy for passes of at most `token_budget` tokens."""
    if options.scheduling_policy != "slo":
        return PriorityPolicy()
    return SLOPolicy(token_budget=token_budget, max_num_seqs=options.max_num_seqs, chunk_alignment=chunk_alignment)


def default_targets(options: EngineOptions) -> LatencyTargets:
    """Returns the engine's default targets."""
    return LatencyTargets(ttft_ms=options.slo_ttft_ms, itl_ms=options.slo_itl_ms, deadline_ms=options.slo_deadline_ms)
