"""Random `GroupedWeight`s of every form that kernels know."""

from dataclasses import replace

import torch

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, packed_pairs

FORMS = (
    "int8-32",
    "int8-row",
    "int8-zeros-64",
    "fp8-row",
    "fp8-128",
    "int4-32",
    "int4-128",
    "int4-64-act-order",
    "int4-32-gaps",
    "int4-minima-32",
    "int4-minima-16",
    "int8-16",
    "int8-minima-32",
    "nvfp4",
    "mxfp4",
)


def random_weight(form: str, n: int, k: int, seed: int = 1) -> GroupedWeight:
    """Every value of a form may occur; about the size of a model's weights."""
    dice = torch.Generator().manual_seed(seed)
    if form in ("nvfp4", "mxfp4"):
        return _float4(form, n, k, dice)
    columns, k = k, k + 64 if form.endswith("-gaps") else k
    kind, *_, last = form.removesuffix("-act-order").removesuffix("-gaps").split("-")
    group = 0 if last == "row" else int(last)
    groups = -(-k // group) if group else 1
    size = k**-0.5 / (4 if kind == "int4" else 64)
    scales = (torch.rand((n, groups), generator=dice) + 0.5) * size
    scales = scales.half() if kind == "int4" else scales
    zeros = None
    if kind == "int4":
        values = packed_pairs(torch.randint(0, 16, (n, k), generator=dice))
        zeros = torch.randint(0, 16, (n, groups), generator=dice).to(torch.uint8)
    elif kind == "int8":
        values = torch.randint(-128, 128, (n, k), generator=dice).to(torch.int8)
    else:
        values = (torch.randn((n, k), generator=dice) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    if "zeros" in form:
        zeros = torch.randint(-128, 128, (n, groups), generator=dice).to(torch.int8)
    if "minima" in form:
        zeros = (-scales.float() * 7.6).half()
    order = None
    if form.endswith(("act-order", "gaps")):
        order = torch.randperm(k, generator=dice).int()
        order[order >= columns] = -1
    return GroupedWeight(kind, values, scales, k, group, zeros, None, order, columns)  # type: ignore[arg-type]  # one of its kinds


def moved(weight: GroupedWeight, device: torch.device) -> GroupedWeight:
    """The same on a device."""
    parts = {name: getattr(weight, name) for name in ("values", "scales", "zeros", "factors", "order")}
    return replace(weight, **{name: tensor.to(device) for name, tensor in parts.items() if tensor is not None})


def _float4(form: str, n: int, k: int, dice: torch.Generator) -> GroupedWeight:
    values = torch.randint(0, 256, (n, (k + 1) // 2), generator=dice).to(torch.uint8)
    if form == "mxfp4":
        scales = torch.randint(118, 126, (n, -(-k // 32)), generator=dice).to(torch.uint8)
        return GroupedWeight("fp4", values, scales, k, 32)
    scales = (torch.rand((n, -(-k // 16)), generator=dice) * 440 + 0.01).to(torch.float8_e4m3fn)
    factors = (torch.rand(n, generator=dice) + 0.5) * k**-0.5 / 2688
    return GroupedWeight("fp4", values, scales, k, 16, factors=factors)
