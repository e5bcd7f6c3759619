"""A rank's part of a layer of integers: the ranks' parts are the whole, in the checkpoint and as kernels read it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.config.quantization.checkpoint import parse_quantization
from mini_infer_engine.config.quantization.integer import IntegerScheme
from mini_infer_engine.kernels.gemm.grouped_weight import dequantized_groups
from mini_infer_engine.layers.linear import Linear, column_parallel, row_parallel
from mini_infer_engine.quantization.integer import IntegerCheckpointMethod
from tests.support.integer_checkpoints import FORMATS, quantization_config, quantized

ROWS, COLUMNS = 64, 256


def _method(form: str, **changes: int) -> IntegerCheckpointMethod:
    raw = quantization_config(FORMATS[form] | changes, head=False)
    schemes = parse_quantization(Fields(Path("config.json"), {"quantization_config": raw}))
    assert schemes is not None
    scheme = schemes.scheme_of("model.layers.0.mlp.down_proj")
    assert isinstance(scheme, IntegerScheme)
    return IntegerCheckpointMethod(scheme)


def _rank(form: str, parallel: TensorParallel, *, by_columns: bool) -> Linear:
    layer = (
        row_parallel(COLUMNS, ROWS, parallel) if by_columns else column_parallel(COLUMNS, parallel.even(ROWS))
    )  # of one rank: the whole layer
    layer.use(_method(form))
    return layer


def _load(layer: Linear, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is read of each tensor."""
    read = {}
    for name, placement in layer.checkpoint_tensors("layer").items():
        tensor = stored[name.removeprefix("layer.")]
        assert placement.obstacle(tuple(tensor.shape), tensor.dtype) is None
        read[name] = tensor if placement.part is None else placement.part.of(tensor)
        placement.place(read[name])
    return read


def _kept(layer: Linear) -> Tensor:
    """The weight that kernels read."""
    assert isinstance(layer.method, IntegerCheckpointMethod)
    weight = layer.method.grouped(layer)
    assert weight is not None
    assert weight.shape == (layer.out_features, layer.in_features)
    return dequantized_groups(weight)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_ranks_integer_weights_make_up_the_whole_weight(form: str, by_columns: bool, size: int) -> None:
    stored, exact = quantized(torch.randn(ROWS, COLUMNS), FORMATS[form], 0)
    layers = [_rank(form, TensorParallel(rank, size), by_columns=by_columns) for rank in range(size)]
    for layer in layers:
        _load(layer, stored)
    parts = [_kept(layer) for layer in layers]
    assert torch.allclose(torch.cat(parts, dim=int(by_columns)), exact, atol=1e-6)


@pytest.mark.parametrize(("size", "together"), [(2, 64), (4, 32)])  # one group and a half each, or three quarters
@pytest.mark.parametrize("form", ["gptq", "awq", "w4a16", "w4a16-asymmetric"])
def test_groups_are_made_smaller_when_ranks_would_cut_them(form: str, size: int, together: int) -> None:
    columns = 128 * 3
    assert columns // size % 128
    config = FORMATS[form] | {"group_size": 128}
    stored, exact = quantized(torch.randn(ROWS, columns), config, 0)
    parts = []
    for rank in range(size):
        layer = row_parallel(columns, ROWS, TensorParallel(rank, size))
        layer.use(_method(form, group_size=128))
        _load(layer, stored)
        parts.append(_kept(layer))
        assert isinstance(layer.method, IntegerCheckpointMethod)
        weight = layer.method.grouped(layer)
        assert weight is not None
        assert weight.group == together
        assert weight.order is None
    assert torch.allclose(torch.cat(parts, dim=1), exact, atol=1e-6)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_each_rank_reads_only_its_integers(form: str, by_columns: bool) -> None:
    stored, _ = quantized(torch.randn(ROWS, COLUMNS), FORMATS[form], 0)
    reads = [_load(_rank(form, TensorParallel(rank, 4), by_columns=by_columns), stored) for rank in range(4)]
    integers = next(name for name in ("qweight", "weight_packed", "weight") if name in stored)
    assert [read[f"layer.{integers}"].numel() * 4 for read in reads] == [stored[integers].numel()] * 4


@pytest.mark.parametrize("form", ["gptq", "awq", "w4a16", "w4a16-asymmetric", "gptq-v2"])
def test_a_rank_has_the_scales_of_its_groups_in_the_kernels_layout(form: str) -> None:
    stored, _ = quantized(torch.randn(ROWS, COLUMNS), FORMATS[form], 0)
    layer = _rank(form, TensorParallel(1, 2), by_columns=True)
    _load(layer, stored)
    assert isinstance(layer.method, IntegerCheckpointMethod)
    weight = layer.method.grouped(layer)
    assert weight is not None
    assert weight.order is None
    assert weight.scales.shape == (ROWS, COLUMNS // 32 // 2)


def test_act_order_with_static_groups_is_read_by_kernels() -> None:
    """As GPTQ's static groups are: each rank's columns are of groups of its own."""
    stored, exact = quantized(torch.randn(ROWS, COLUMNS), FORMATS["gptq"], 0)
    for rank in range(2):
        layer = _rank("gptq-act-order", TensorParallel(rank, 2), by_columns=True)
        _load(layer, stored)
        assert isinstance(layer.method, IntegerCheckpointMethod)
        weight = layer.method.grouped(layer)
        assert weight is not None
        half = slice(rank * COLUMNS // 2, (rank + 1) * COLUMNS // 2)
        assert torch.allclose(dequantized_groups(weight), exact[:, half], atol=1e-6)
