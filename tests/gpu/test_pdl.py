"""Programmatic dependent launch: a chain of kernels that overlap gives what it gives one after another."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.attention.attention_config import PrefillShape
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.kernels.gemm.gemm_config import DeferredRMSNorm, PdlGemmConfig
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.norm.rms_norm import rms_norm
from tests.gpu.device import BF16, DEVICE, POLICY, WORKSPACE, normal
from tests.gpu.paged import make_paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("hopper_kernels"),
]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE = 512, 8, 2, 128, 1536
LENGTH, PAGE_SIZE = 300, 128
SHAPE = PrefillShape(BF16, BF16, 0, 0, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, None, 0)


@dataclass
class Layer:
    """Weights of one, all [columns, width]."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def weight(columns: int, width: int, seed: int) -> torch.Tensor:
    return normal(columns, width, dtype=BF16, seed=seed) * width**-0.5


def config_of(rows: int, matrix: torch.Tensor, *, gated: bool = False) -> PdlGemmConfig:
    n, k = matrix.shape
    config = POLICY.small_m_config(rows, n // 2 if gated else n, k, BF16, gated=gated, tma_operands=True)
    assert isinstance(config, PdlGemmConfig)
    return config


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("shape", [None, SHAPE], ids=["portable", "hopper"])
@pytest.mark.parametrize("rows", [1, 8, 12, 32, 50])
def test_replays_equal_kernels_one_by_one(rows: int, shape: PrefillShape | None, early: bool) -> None:
    layers = [
        Layer(
            weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, seed),
            weight(HIDDEN, HEADS * HEAD_DIM, seed + 1),
            weight(2 * MIDDLE, HIDDEN, seed + 2),
            weight(HIDDEN, MIDDLE, seed + 3),
        )
        for seed in range(0, 40, 4)
    ]
    paged = make_paged([LENGTH] * rows, PAGE_SIZE, KV_HEADS, HEAD_DIM, BF16)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    positions = torch.full((rows,), LENGTH - 1, device=DEVICE)
    rotation = Rotation(normal(LENGTH, HEAD_DIM, dtype=BF16, seed=1))
    hidden, norm = normal(rows, HIDDEN, dtype=BF16, seed=2), normal(HIDDEN, dtype=BF16, seed=3)

    def step(settle: Callable[[], None]) -> torch.Tensor:
        """A decode step; `settle` is called behind each kernel that the next one may overlap."""
        config = POLICY.decode_config(rows, KV_HEADS, shape=shape)
        assert config.hopper is (shape is not None)
        plan = plan_decode(
            slots, positions, positions, KV_HEADS, 1024, config=config, page_tables=paged.tables, page_size=PAGE_SIZE
        )
        stream, x = hidden, rms_norm(hidden, norm, 1e-6)

        def then_norm(values: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, DeferredRMSNorm]:
            config = config_of(rows, matrix)
            made = small_m_linear_add_norm(
                values, matrix, config, workspace=WORKSPACE, bias=None, residual=stream, norm_weight=norm, eps=1e-6
            )
            settle()
            return made

        for number, layer in enumerate(layers):
            qkv = small_m_linear(x, layer.qkv, config_of(rows, layer.qkv), workspace=WORKSPACE)
            settle()
            mixed = decode_attention(
                qkv,
                rotation,
                paged.pool,
                paged.tables,
                plan,
                scale=HEAD_DIM**-0.5,
                workspace=WORKSPACE,
                early=early and number > 0,
            )
            settle()
            stream, x = then_norm(mixed, layer.o)
            gated = small_m_linear(
                x, layer.gate_up, config_of(rows, layer.gate_up, gated=True), workspace=WORKSPACE, gated=True
            )
            settle()
            stream, x = then_norm(gated, layer.down)
        return stream

    tables = paged.tables.clone()

    def move(turn: int) -> None:
        """To shorter sequences with other rows' pages, and back: what is read too early would be the last turn's."""
        positions.fill_(LENGTH - 1 - 70 * turn)
        paged.tables.copy_(tables.roll(turn, 0))

    expected = [torch.empty(0)] * 2
    for turn in (0, 1, 0, 1):  # the first ones' new tokens are among what the others read
        move(turn)
        expected[turn] = step(torch.cuda.synchronize).clone()
        assert expected[turn].isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step(lambda: None)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for replay in range(200):
        turn = replay // 3 % 2
        if replay % 3 == 0:  # at times one replay begins right behind another
            move(turn)
        graph.replay()
        if replay % 3 == 0:
            different += (actual != expected[turn]).any()
            actual.zero_()
    assert not different, "results depend on timing"
    for turn in (0, 1) * 10:
        move(turn)
        assert torch.equal(step(lambda: None), expected[turn])
