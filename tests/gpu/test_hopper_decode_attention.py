"""hopper_decode_attention: on Hopper, and what the kernel says by programs on a CPU (`gluon_on_cpu`)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton; on a CPU with TRITON_INTERPRET=1")
pytest.importorskip("triton.experimental.gluon", reason="needs a Triton that has Gluon")

from mini_infer_engine.kernels.attention import hopper_decode_attention as module
from mini_infer_engine.kernels.attention.attention_config import DecodeConfig
from tests.gpu.decoding import DecodeShape, assert_decodes
from tests.gpu.device import BF16, INTERPRETED, KERNELS, cases
from tests.gpu.hopper import enforce, here
from tests.support.gluon_on_cpu import Pointer, run_kernel

pytestmark = KERNELS
SHAPES = cases(
    [
        (4, 2, 64, 32, None),
        (7, 1, 64, 64, 40),
        (3, 3, 128, 32, None),
        (16, 1, 64, 32, None),
    ],
    [
        (28, 4, 128, 128, None),
        (12, 2, 128, 256, None),
        (16, 8, 128, 128, None),
        (8, 8, 128, 128, 1000),
        (32, 8, 128, 64, 4096),
        (14, 2, 64, 128, None),
        (8, 1, 64, 256, 100),
        (8, 4, 256, 128, None),
        (16, 1, 256, 64, 300),
        (16, 1, 128, 128, None),
    ],
)


class _ByPrograms:
    """In the kernel's place on a CPU."""

    def __init__(self) -> None:
        self._kernels = SimpleNamespace(**vars(module))

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
            assert launch_pdl
            assert num_warps == 4
            pointers = [
                Pointer(value, value.storage_offset()) if isinstance(value, torch.Tensor) else value for value in args
            ]
            run_kernel(self._kernels, "_hopper_decode_attention", (*grid, 1), *pointers, **constants)

        return launch


@pytest.mark.parametrize(("with_norm", "has_sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size", "window"), SHAPES)
def test_hopper_decode_attention_equals_reference(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    with_norm: bool,
    has_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if INTERPRETED:
        monkeypatch.setattr(module, "_hopper_decode_attention", _ByPrograms())
    else:
        enforce(here())
    block = min(128, 16_384 // head_dim, page_size)
    configs = [
        DecodeConfig(1, block, programs_per_row=1.0, pdl=True, hopper=True),
        DecodeConfig(132, block, pdl=True, hopper=True),
        DecodeConfig(40, 32, stages=3, pdl=True, hopper=True),
        DecodeConfig(1, max(32, block // 4), programs_per_row=1.0, pdl=True, hopper=True),
        DecodeConfig(132, max(32, block // 2), stages=3, pdl=True, hopper=True),
    ]
    shape = DecodeShape(q_heads, kv_heads, head_dim, page_size, window, BF16)
    assert_decodes(shape, configs, with_norm=with_norm, has_sinks=has_sinks)
