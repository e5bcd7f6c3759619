"""Mixtures of experts: routing and both ways to compute experts, against fp64."""

from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU or TRITON_INTERPRET=1")

from mini_infer_engine.kernels.gemm.grouped_weight import (
    GroupedWeight,
    dequantized_groups,
    ordered_for_mx_experts,
    stacked,
)
from mini_infer_engine.kernels.moe.expert_gemv import expert_gemv
from mini_infer_engine.kernels.moe.grouped_gemm import grouped_experts
from mini_infer_engine.kernels.moe.mx_experts import mx_experts
from mini_infer_engine.kernels.moe.route import Routing, route
from mini_infer_engine.layers.grouped import multiplies_mx_in_registers
from mini_infer_engine.layers.moe import MoESpec, swiglu_oai
from mini_infer_engine.ops import torch_ops
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, POLICY, cases, error, normal
from tests.support.grouped_weights import moved, random_weight

pytestmark = KERNELS


def compute(
    grouped: bool,
    x: torch.Tensor,
    routing: Routing,
    experts: int,
    gate_up: torch.Tensor | GroupedWeight,
    down: torch.Tensor | GroupedWeight,
    **options: Any,
) -> torch.Tensor:
    """What `experts` make of x, by one kernel or the other."""
    if isinstance(gate_up, GroupedWeight) and gate_up.kind == "mxfp4":
        assert isinstance(down, GroupedWeight)
        return mx_experts(x, routing, gate_up, down, **options)
    if not grouped:
        return expert_gemv(x, routing, gate_up, down, **options)
    tokens, top_k = routing.experts.shape
    tiles = POLICY.expert_tiles(max(2, tokens), top_k, experts, x.dtype, is_plain=isinstance(gate_up, torch.Tensor))
    assert tiles is not None
    return grouped_experts(x, routing, gate_up, down, tiles, **options)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), cases([(3, 5, 2), (20, 16, 4)], [(700, 128, 8), (64, 60, 4)]))
def test_routing_chooses_what_torch_does_and_lists_every_pair_once(
    tokens: int, experts: int, top_k: int, normalizes: bool
) -> None:
    logits = normal(tokens, experts)
    spec = MoESpec(8, 8, experts, top_k, normalizes)
    weights, chosen = torch_ops.route(logits, spec)
    routing = route(logits, top_k, normalizes_top_k=normalizes, groups=True)
    assert torch.equal(routing.experts.long(), chosen)
    assert torch.allclose(routing.weights, weights, atol=1e-6)
    assert torch.equal(routing.counts.long().cpu(), torch.bincount(chosen.flatten().cpu(), minlength=experts))
    listed = [routing.pairs[expert, :count].tolist() for expert, count in enumerate(routing.counts.tolist())]
    assert sorted(pair for pairs in listed for pair in pairs) == list(range(tokens * top_k))
    flat = chosen.flatten().tolist()
    assert all(flat[pair] == expert for expert, pairs in enumerate(listed) for pair in pairs)


@pytest.mark.parametrize(("experts", "top_k", "num_groups"), cases([(4, 2, 1), (6, 3, 2)], [(128, 8, 1), (64, 6, 8)]))
def test_rows_without_numbers_choose_each_expert_once(experts: int, top_k: int, num_groups: int) -> None:
    """Padding's: an expert that was chosen twice would have more pairs than its list has room for."""
    tokens, known = 16, 3
    logits = normal(tokens, experts)
    logits[known:] = float("nan")
    groups = {"num_groups": num_groups, "top_groups": max(1, num_groups // 2)}
    routing = route(logits, top_k, normalizes_top_k=True, groups=True, **groups)
    alone = route(logits[:known], top_k, normalizes_top_k=True, groups=False, **groups)
    assert torch.equal(routing.experts[:known], alone.experts)
    chosen = routing.experts.tolist()
    assert all(len(set(row)) == top_k and set(row) <= set(range(experts)) for row in chosen)
    assert sum(routing.counts.tolist()) == tokens * top_k
    for expert, count in enumerate(routing.counts.tolist()):
        pairs = routing.pairs[expert, :count].tolist()
        assert len(set(pairs)) == count
        assert all(chosen[pair // top_k][pair % top_k] == expert for pair in pairs)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", cases([FP32], [BF16]))
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width"),
    cases(
        [(1, 4, 2, 48, 24), (9, 3, 2, 40, 20), (5, 3, 2, 64, 32)],
        [(1, 128, 8, 2048, 768), (40, 16, 4, 256, 136), (600, 32, 2, 512, 384)],
    ),
)
def test_experts_compute_their_tokens(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype, grouped: bool
) -> None:
    x = normal(tokens, hidden, dtype=dtype)
    gate_up = normal(experts, 2 * width, hidden, dtype=dtype) / hidden**0.5
    down = normal(experts, hidden, width, dtype=dtype, seed=1) / width**0.5
    routing = route(normal(tokens, experts, dtype=dtype, seed=2), top_k, normalizes_top_k=True, groups=grouped)
    summands = compute(grouped, x, routing, experts, gate_up, down)
    for choice in range(top_k):
        chosen = routing.experts[:, choice].long()
        both = torch.einsum("th,tnh->tn", x.double(), gate_up.double()[chosen])
        gate, up = both.chunk(2, dim=-1)
        made = torch.einsum("tn,thn->th", functional.silu(gate) * up, down.double()[chosen])
        assert error(summands[choice], made * routing.weights[:, choice, None].double()) < 16


@pytest.mark.parametrize("form", ["plain", "mxfp4", "mxfp4 in registers"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width", "dtype"),
    cases(
        [(3, 3, 2, 64, 32, FP32)],
        [(tokens, 32, 4, 2880, 2880, BF16) for tokens in (1, 2, 36, 100)]
        + [(tokens, 16, 4, 512, 416, BF16) for tokens in (300, 1100)],
    ),
)
def test_experts_with_biases_and_a_limit_compute_their_tokens(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype, grouped: bool, form: str
) -> None:
    """Experts have biases as gpt-oss's do, on all ranks or with one expert elsewhere, whose summands are zero."""
    in_registers = form == "mxfp4 in registers"
    if in_registers and not (dtype == BF16 and multiplies_mx_in_registers(torch.device(DEVICE))):
        pytest.skip("the kernel is for Hopper")
    x = normal(tokens, hidden, dtype=dtype)
    stacks: list[torch.Tensor | GroupedWeight] = [
        normal(experts, 2 * width, hidden, dtype=dtype) / hidden**0.5,
        normal(experts, hidden, width, dtype=dtype, seed=1) / width**0.5,
    ]
    if form != "plain":
        shapes = ((2 * width, hidden), (hidden, width))
        stacks = [
            stacked([moved(random_weight(form.split()[0], rows, columns, seed), DEVICE) for seed in range(experts)])
            for rows, columns in shapes
        ]
        if in_registers:
            stacks = [ordered_for_mx_experts(weight) for weight in stacks if isinstance(weight, GroupedWeight)]
    biases = [normal(experts, rows, dtype=dtype, seed=4) for rows in (2 * width, hidden)]
    limit = 0.75
    wide_gate_up, wide_down = (
        (weight if isinstance(weight, torch.Tensor) else dequantized_groups(weight)).double() for weight in stacks
    )
    logits = normal(tokens, experts, dtype=dtype, seed=2)
    for local in (None, range(1, experts)):
        own = [weight if local is None else _local(weight, local) for weight in stacks]
        own_biases = [bias if local is None else bias[local.start :] for bias in biases]
        options = {"gate_up_bias": own_biases[0], "down_bias": own_biases[1], "swiglu_limit": limit}
        routing = route(logits, top_k, normalizes_top_k=True, groups=grouped, local=local)
        summands = compute(grouped, x, routing, experts, own[0], own[1], **options)
        whole = route(logits, top_k, normalizes_top_k=True, groups=False)
        for choice in range(top_k):
            chosen = whole.experts[:, choice].long()
            both = torch.einsum("th,tnh->tn", x.double(), wide_gate_up[chosen]) + biases[0].double()[chosen]
            between = swiglu_oai(*both.chunk(2, dim=-1), limit)
            made = torch.einsum("tn,thn->th", between, wide_down[chosen]) + biases[1].double()[chosen]
            made *= whole.weights[:, choice, None].double()
            if local is not None:
                made *= (chosen >= local.start)[:, None]
            assert error(summands[choice], made) < 16


def _local(weight: torch.Tensor | GroupedWeight, local: range) -> torch.Tensor | GroupedWeight:
    rows = slice(local.start, local.stop)
    return weight[rows] if isinstance(weight, torch.Tensor) else weight.at(rows)


@pytest.mark.parametrize("form", ["int8-row", "fp8-128", "int4-32", "nvfp4"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width", "dtype"),
    cases([(3, 3, 2, 64, 32, FP32)], [(2, 64, 8, 2048, 768, BF16), (300, 16, 4, 512, 384, BF16)]),
)
def test_quantised_experts_compute_their_tokens(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype, grouped: bool, form: str
) -> None:
    gate_up, down = (
        stacked([moved(random_weight(form, rows, columns, seed), DEVICE) for seed in range(experts)])
        for rows, columns in ((2 * width, hidden), (hidden, width))
    )
    x = normal(tokens, hidden, dtype=dtype)
    routing = route(normal(tokens, experts, dtype=dtype, seed=2), top_k, normalizes_top_k=True, groups=grouped)
    summands = compute(grouped, x, routing, experts, gate_up, down)
    wide_gate_up, wide_down = (dequantized_groups(weight).double() for weight in (gate_up, down))
    for choice in range(top_k):
        chosen = routing.experts[:, choice].long()
        gate, up = torch.einsum("th,tnh->tn", x.double(), wide_gate_up[chosen]).chunk(2, dim=-1)
        made = torch.einsum("tn,thn->th", functional.silu(gate) * up, wide_down[chosen])
        assert error(summands[choice], made * routing.weights[:, choice, None].double()) < 16


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", cases([FP32], [BF16]))
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width"),
    cases(
        [(2, 4, 2, 24, 12), (9, 4, 2, 24, 12)], [(1, 128, 8, 2048, 768), (40, 16, 4, 256, 136), (600, 32, 2, 512, 384)]
    ),
)
def test_ranks_with_some_experts_each_make_summands_of_the_whole(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype, grouped: bool
) -> None:
    x = normal(tokens, hidden, dtype=dtype)
    gate_up = normal(experts, 2 * width, hidden, dtype=dtype) / hidden**0.5
    down = normal(experts, hidden, width, dtype=dtype, seed=1) / width**0.5
    logits = normal(tokens, experts, dtype=dtype, seed=2)
    whole_routing = route(logits, top_k, normalizes_top_k=True, groups=grouped)
    whole = compute(grouped, x, whole_routing, experts, gate_up, down)
    summed = torch.zeros_like(whole)
    for begin in (0, experts // 2):
        local = range(begin, begin + experts // 2)
        routing = route(logits, top_k, normalizes_top_k=True, groups=grouped, local=local)
        assert torch.equal(routing.weights, whole_routing.weights)
        is_here = (whole_routing.experts >= local.start) & (whole_routing.experts < local.stop)
        assert torch.equal(routing.experts, torch.where(is_here, whole_routing.experts - local.start, -1))
        part = compute(grouped, x, routing, experts, gate_up[local.start : local.stop], down[local.start : local.stop])
        assert not part.transpose(0, 1)[~is_here].any(), "another rank's experts make nothing here"
        summed += part
    assert torch.equal(summed, whole), "each pair is computed by one rank, in the same way"


@pytest.mark.parametrize("dtype", cases([FP32], [BF16]))
def test_experts_of_other_ranks_make_nothing_whatever_stands_before_the_first_one(dtype: torch.dtype) -> None:
    """Where each row has a factor, too: those in front of this rank's experts are no numbers."""
    tokens, experts, hidden, width = 3, 4, 64, 32
    stacks = []
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        stack = stacked([moved(random_weight("nvfp4", rows, columns, seed), DEVICE) for seed in range(experts)])
        assert stack.factors is not None
        stack.factors[1] = float("nan")
        stacks.append(stack.at(slice(2, experts)))
    x, logits = normal(tokens, hidden, dtype=dtype), normal(tokens, experts, dtype=dtype, seed=2)
    logits[0, :2] = 9.0  # both of the first token's experts are elsewhere
    routing = route(logits, 2, normalizes_top_k=True, groups=False, local=range(2, experts))
    summands = expert_gemv(x, routing, *stacks)
    assert summands.isfinite().all()
    assert not summands.transpose(0, 1)[routing.experts < 0].any()
    assert not summands[:, 0].any()
