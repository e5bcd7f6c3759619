"""Kernels of layers with a recurrent state, against blocks in torch: outputs, and every slot that is written."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.config.model.recurrence import GatedDeltaSpec, Mamba2Spec, ShortConvolutionSpec
from mini_infer_engine.config.parallelism.tensor_parallel import ALONE
from mini_infer_engine.core.batch import Row
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.recurrence.gated_delta_config import StepConfig
from mini_infer_engine.kernels.recurrence.restore_states import restore_states
from mini_infer_engine.layers.gated_delta_net import GatedDeltaNet
from mini_infer_engine.layers.mamba2 import Mamba2
from mini_infer_engine.layers.short_convolution import ShortConvolution
from mini_infer_engine.models.state_spec import StateSpec
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from mini_infer_engine.runtime.recurrent import triton_pass
from mini_infer_engine.runtime.recurrent.pass_tables import (
    PaddedTables,
    blank_steps,
    decode_tables,
    pass_tables,
    verify_tables,
)
from mini_infer_engine.runtime.recurrent.torch_pass import TorchRecurrentPass
from mini_infer_engine.runtime.recurrent.triton_pass import TritonRecurrentPass
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, POLICY, WORKSPACE, cases, error, normal

pytestmark = KERNELS
CONTEXT = KernelContext(POLICY, WORKSPACE)
ROWS = [
    Row(0, 40, 1, None, [], None),
    Row(1, 0, 1, [3], [], None, checkpoints=[(1, 2)]),
    Row(2, 16, 1, [3], [], None, state_source=0),
    Row(3, 0, 70, [3] * 70, [], None, checkpoints=[(2, 3), (64, 4)]),
    Row(4, 32, 33, [3] * 33, [], None, state_source=1, checkpoints=[(33, 5)]),
    Row(5, 7, 2, [3] * 2, [], None),
]
"""Rows that begin, go on and resume, of one token and of more, with checkpoints inside and at the end."""
LONG = [Row(5, 7, 400, [3] * 400, [], None, checkpoints=[(130, 5)]), Row(2, 0, 129, [3] * 129, [], None)]
SELECTIONS = {"steps": ROWS[:3], "mixed": ROWS, "scan": ROWS[3:4]}
CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 3,
    "recurrent_layers": (0, 1, 2),
    "rms_norm_eps": 1e-6,
    "tensor_parallel": ALONE,
    "quantization": None,
}
SMALL_MAMBA = Mamba2Spec(
    num_heads=3,
    head_dim=16,
    state_size=12,
    num_groups=1,
    kernel_size=4,
    norm_eps=1e-6,
    norm_groups=1,
    time_step_limits=(0.0, 0.6),
    convolution_bias=True,
    projection_bias=False,
)
SMALL = {
    "gated delta": GatedDeltaSpec(2, 4, 24, 40, 4),
    "state space": SMALL_MAMBA,
    "short convolution": ShortConvolutionSpec(70, 3, bias=False),
    "short convolution of width 1": ShortConvolutionSpec(70, 1, bias=True),
}
LARGE = {
    "gated delta, Qwen3-Next": GatedDeltaSpec(16, 32, 128, 128, 4),
    "state space, Granite 4": replace(SMALL_MAMBA, num_heads=128, head_dim=64, state_size=128),
    "state space, Nemotron-H": replace(
        SMALL_MAMBA, num_heads=128, head_dim=64, state_size=128, num_groups=8, norm_groups=8
    ),
    "short convolution, LFM2": ShortConvolutionSpec(2048, 3, bias=False),
}


class NoAttention:
    """The attention of a pass that has none."""

    logits_indices = positions = None


class World:
    """A block with random weights, and two pools with the same random states: torch's and the kernels'."""

    def __init__(self, kind: str, dtype: torch.dtype, num_drafts: int = 0) -> None:
        spec = (SMALL | LARGE)[kind]
        config: Any = SimpleNamespace(**CONFIG)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(DEVICE):
                self.block = make_block(config, spec)
        finally:
            torch.set_default_dtype(FP32)
        for seed, (name, weight) in enumerate(sorted(self.block.named_parameters())):
            scale = 0.5 if name in ("A_log", "dt_bias", "D") else 0.4
            weight.copy_(normal(*weight.shape, seed=seed) * scale)
        self.dtype, self.spec = dtype, spec
        state = StateSpec(3, spec.convolution_channels, spec.kernel_size - 1, spec.state_shape, dtype)
        self.pools = [StatePool(state, StateSlots(state.slot_bytes, 6, 6, num_drafts), DEVICE) for _ in range(2)]
        for pool in self.pools:
            for seed, tensor in enumerate((pool.convolutions, pool.states)):
                tensor.copy_(normal(*tensor.shape, dtype=tensor.dtype, seed=seed))

    def tensors(self, pool: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the memory of one of the pools."""
        return self.pools[pool].convolutions, self.pools[pool].states

    def compute(self, one: Any, tokens: int) -> torch.Tensor:
        """Returns the output of a pass for random projections, which are the same for every pass."""
        block, spec = self.block, self.spec
        projected = normal(tokens, block.in_proj.out_features, dtype=self.dtype)
        out: torch.Tensor
        if isinstance(block, GatedDeltaNet):
            out = one.gated_delta_net(block.divide(projected), block)
        elif isinstance(block, Mamba2):
            out = one.mamba2(projected, block)
        else:
            assert isinstance(spec, ShortConvolutionSpec)
            out = one.short_convolution(projected, block)
        return out


def make_block(config: Any, spec: Any) -> Any:
    """A block of the second layer."""
    makers: dict[type, Callable[[], Any]] = {
        GatedDeltaSpec: lambda: GatedDeltaNet(config, 1, spec, by_key_head=False),
        Mamba2Spec: lambda: Mamba2(config, 1, spec),
        ShortConvolutionSpec: lambda: ShortConvolution(config, 1, spec),
    }
    return makers[type(spec)]()


def passes(world: World, rows: list[Row]) -> tuple[Any, Any]:
    """A pass in torch over the first pool, and one by kernels over the second."""
    attention: Any = NoAttention()
    return (
        TorchRecurrentPass(attention, world.pools[0], rows, DEVICE),
        TritonRecurrentPass(attention, world.pools[1], pass_tables(rows, world.pools[1], DEVICE), CONTEXT),
    )


def check(world: World, expected: torch.Tensor, actual: torch.Tensor, tolerance: float) -> None:
    """Compares outputs and all slots."""
    assert error(actual, expected) <= tolerance
    assert torch.equal(world.pools[0].convolutions, world.pools[1].convolutions)
    if world.pools[0].states.numel():
        narrow = (pool.states.to(world.dtype) for pool in reversed(world.pools))
        assert error(*narrow) <= tolerance


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("kind", cases(SMALL, LARGE))
def test_blocks_equal_torch_when_rows_begin_go_on_and_resume(kind: str, selection: str) -> None:
    rows, world = SELECTIONS[selection], World(kind, FP32)
    tokens = sum(row.count for row in rows)
    expected, actual = (world.compute(one, tokens) for one in passes(world, rows))
    check(world, expected, actual, 300.0)


@pytest.mark.parametrize("kind", cases(["gated delta"], ["gated delta, Qwen3-Next"]))
def test_steps_equal_torch_when_a_program_has_a_whole_head(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_pass, "step_config", lambda *_, **__: StepConfig(1024, 8))
    world = World(kind, FP32)
    expected, actual = (world.compute(one, 3) for one in passes(world, ROWS[:3]))
    check(world, expected, actual, 300.0)


@pytest.mark.parametrize("kind", cases([], LARGE))
@pytest.mark.parametrize("rows", [ROWS, LONG], ids=["mixed", "long"])
def test_blocks_equal_torch_when_they_are_in_bf16(kind: str, rows: list[Row]) -> None:
    world = World(kind, BF16)
    tokens = sum(row.count for row in rows)
    expected, actual = (world.compute(one, tokens) for one in passes(world, rows))
    check(world, expected, actual, 8.0)


@pytest.mark.parametrize("kind", cases(SMALL, LARGE))
def test_padding_changes_no_state_when_slots_are_on_the_device(kind: str) -> None:
    world = World(kind, FP32)
    attention: Any = NoAttention()
    before = [tensor.clone() for tensor in world.tensors(1)]
    padding = world.pools[1].slots.num_sequences
    slots = torch.tensor([4, 1, padding, padding], dtype=torch.int32, device=DEVICE)
    tables = decode_tables(slots, blank_steps(4, DEVICE), padding)
    actual = world.compute(TritonRecurrentPass(attention, world.pools[1], tables, CONTEXT), 4)
    rows = [Row(slot, 9, 1, None, [], None) for slot in (4, 1, 0, 2)]
    expected = world.compute(TorchRecurrentPass(attention, world.pools[0], rows, DEVICE), 4)
    assert error(actual[:2], expected[:2]) <= 300.0
    assert not actual[2:].any()
    others = [slot for slot in range(12) if slot not in (4, 1)]
    for mine, theirs, untouched in zip(world.tensors(1), world.tensors(0), before, strict=True):
        assert torch.equal(mine[others], untouched[others])
        if mine.numel():
            assert error(mine[[4, 1]], theirs[[4, 1]]) <= 300.0


@pytest.mark.parametrize("kind", cases(SMALL, LARGE))
def test_states_before_draft_tokens_are_kept_and_one_is_restored_when_tokens_are_verified(kind: str) -> None:
    world = World(kind, FP32, num_drafts=3)
    attention: Any = NoAttention()
    mine, pool = world.pools[1], world.pools[0]
    padding = mine.slots.num_sequences
    drafted = [0, 4, 5]
    slots = torch.tensor([*drafted, padding], dtype=torch.int32, device=DEVICE)
    tables = verify_tables(slots, blank_steps(4, DEVICE, 3), 3, mine, padding)
    actual = world.compute(TritonRecurrentPass(attention, mine, tables, CONTEXT), 12)
    rows = [Row(slot, 9, 3, [3] * 3, [], None, checkpoints=mine.draft_checkpoints(slot, 2)) for slot in (*drafted, 1)]
    expected = world.compute(TorchRecurrentPass(attention, pool, rows, DEVICE), 12)
    assert error(actual[:9], expected[:9]) <= 300.0
    assert not actual[9:].any()
    kept = [*drafted, *(pool.first_draft_slot + slot * 3 + place for slot in drafted for place in range(2))]
    for here, there in zip(world.tensors(1), world.tensors(0), strict=True):
        if here.numel():
            assert error(here[kept], there[kept]) <= 300.0
    made = torch.tensor([[1, 0, 0, 0], [3, 0, 0, 0], [2, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.int64, device=DEVICE)
    whole = mine.storage.clone()
    restore_states(mine.storage, slots, made, mine.first_draft_slot, 3, padding)
    whole[0], whole[5] = whole[mine.first_draft_slot], whole[mine.first_draft_slot + 5 * 3 + 1]
    assert torch.equal(mine.storage, whole)


@pytest.mark.parametrize("kind", cases(SMALL, LARGE))
def test_blocks_equal_torch_when_tables_are_padded(kind: str) -> None:
    """As in a recorded pass, where tokens that are in no row follow the others."""
    world = World(kind, FP32)
    attention: Any = NoAttention()
    tokens = sum(row.count for row in ROWS)
    padded = PaddedTables(tokens + 30, 6, 5, world.pools[1], DEVICE)
    padded.load(ROWS[:1])
    padded.load(ROWS)
    torch_pass, _ = passes(world, [*ROWS, Row(1, 9, 30, [3] * 30, [], None)])
    expected = world.compute(torch_pass, tokens + 30)
    actual = world.compute(TritonRecurrentPass(attention, world.pools[1], padded.tables, CONTEXT), tokens + 30)
    assert error(actual[:tokens], expected[:tokens]) <= 300.0
    assert not actual[tokens:].any()
    kept = [slot for slot in range(12) if slot != 1]
    for mine, theirs in zip(world.tensors(1), world.tensors(0), strict=True):
        if mine.numel():
            assert error(mine[kept], theirs[kept]) <= 300.0


def test_repeated_keys_keep_the_solution_exact_when_nothing_decays() -> None:
    """The inverse of a chunk's system is then far from the sum of the powers of its matrix."""
    world = World("gated delta", FP32)
    block = world.block
    block.A_log.fill_(-20.0)
    block.conv1d.weight.zero_()
    block.conv1d.weight[:, 0, -1] = 1.0
    rows = [Row(0, 0, 130, [3] * 130, [], None)]
    line = normal(1, block.in_proj.out_features)
    projected = line.expand(130, -1).contiguous()
    projected[:, -8:-4] = 6.0  # strengths near 1
    outs = [one.gated_delta_net(block.divide(projected), block) for one in passes(world, rows)]
    assert error(outs[1], outs[0]) <= 1000.0
