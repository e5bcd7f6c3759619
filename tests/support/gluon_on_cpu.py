"""Runs a Gluon kernel for Hopper on a CPU, program after program, for Triton's interpreter has no Gluon.

What large_m_gemm, pdl_gemm and hopper_decode_attention are made of, with Triton's values but without its layouts:
copies arrive at once, a wgmma runs no sooner than it is waited for (so a stage that is filled too early shows), and
inline PTX is computed instruction by instruction. Whether layouts fit and threads are synchronised, only a GPU tells.
"""

import itertools
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


class ElementType:
    """A tensor's or a descriptor's dtype, with what Triton's tell of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, dtype.itemsize * 8

    def __eq__(self, other: object) -> bool:
        return self.dtype == (other.dtype if isinstance(other, ElementType) else other)

    def __hash__(self) -> int:
        return hash(self.dtype)


class Constant(int):
    """A number of a kernel's module."""

    @property
    def value(self) -> int:
        """As a plain number."""
        return int(self)


class Values(torch.Tensor):
    """A tensor with Triton's conversions."""

    @property
    def type(self) -> Any:
        """As Triton's, whose layout says nothing here."""
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        """Another dtype, or the same bits read as one."""
        return self.view(dtype) if bitcast else super().to(dtype)


def values(tensor: torch.Tensor) -> Any:
    """The same memory."""
    return tensor.as_subclass(Values)


@dataclass(frozen=True)
class Pointer:
    """Memory from its beginning on, and places in it."""

    memory: torch.Tensor
    offsets: Any = 0

    @property
    def dtype(self) -> Any:
        """Of a pointer, as Triton names it."""
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offsets: Any) -> "Pointer":
        """Further places."""
        return Pointer(self.memory, self.offsets + offsets)

    def __getitem__(self, at: Any) -> "Pointer":
        """Places with more dimensions."""
        return Pointer(self.memory, self.offsets[at])


def load(pointer: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = "") -> Any:
    """`gl.load`. An assertion: it reads beyond the memory."""
    del cache_modifier
    places = torch.as_tensor(pointer.offsets)
    mask = torch.as_tensor(mask).broadcast_to(places.shape)
    flat = _flat(pointer.memory)
    assert ((places >= 0) & (places < flat.numel()))[mask].all(), "read beyond memory"
    found = flat[torch.where(mask, places, 0).long()]
    return values(torch.where(mask, found, torch.tensor(other).to(found.dtype)))


def store(pointer: Pointer, made: Any, mask: Any = True) -> None:
    """`gl.store`. An assertion: it writes beyond the memory."""
    places, made = torch.broadcast_tensors(torch.as_tensor(pointer.offsets), torch.as_tensor(made))
    mask = torch.as_tensor(mask).broadcast_to(places.shape)
    flat = _flat(pointer.memory)
    assert ((places >= 0) & (places < flat.numel()))[mask].all(), "written beyond memory"
    flat[places[mask].long()] = made[mask].as_subclass(torch.Tensor).to(flat.dtype)


def _add(pointer: Pointer, more: int, sem: str) -> Any:
    """`gl.atomic_add`, for programs run one after another."""
    assert sem == "acq_rel"
    before = load(pointer).clone()
    store(pointer, before + more)
    return before


def _flat(memory: torch.Tensor) -> torch.Tensor:
    return memory.as_strided((memory.untyped_storage().nbytes() // memory.itemsize,), (1,), 0)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    @property
    def dtype(self) -> ElementType:
        """Of its elements."""
        return ElementType(self.memory.dtype)

    def index(self, at: int) -> "Shared":
        """One along the first dimension."""
        assert 0 <= at < self.memory.shape[0], "beyond shared memory"
        return Shared(self.memory[at])

    @property
    def shape(self) -> list[int]:
        """Of all stages."""
        return list(self.memory.shape)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: object) -> "Shared":
        """The same memory, whose rows are as wide as before or follow each other."""
        del layout
        assert ElementType(self.memory.dtype) == dtype
        return Shared(self.memory.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        """Dimensions in another order."""
        return Shared(self.memory.permute(order))

    def slice(self, start: int, length: int) -> "Shared":
        """Some along the first dimension."""
        assert 0 <= start <= start + length <= self.memory.shape[0], "beyond shared memory"
        return Shared(self.memory[start : start + length])

    def store(self, made: Any) -> None:
        """All of it."""
        assert self.shape == list(made.shape)
        self.memory.copy_(made)

    def load(self, layout: object) -> Any:
        """A copy."""
        del layout
        return values(self.memory.clone())


@dataclass
class Descriptor:
    """A TMA descriptor of a matrix."""

    memory: torch.Tensor
    block_shape: list[int]
    layout: None = None

    @property
    def dtype(self) -> ElementType:
        """Of its elements."""
        return ElementType(self.memory.dtype)


@dataclass
class Barrier:
    """An mbarrier: how often it was filled, bytes that it still waits for."""

    fills: int = 0
    missing: int = 0


class Barriers:
    """Of all stages, by `index`."""

    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, at: int) -> Barrier:
        """One of them."""
        return self._all[at]


def _expect(barrier: Barrier, byte_count: int, pred: bool = True) -> None:
    if pred:
        assert not barrier.missing, "expected anew before the last copy has arrived"
        barrier.missing, barrier.fills = byte_count, barrier.fills + 1


def _wait(barrier: Barrier, parity: int) -> None:
    assert not barrier.missing, "waits for ever: fewer bytes than expected"
    assert barrier.fills > 0, "waits for ever: nothing was fetched"
    assert (barrier.fills - 1) & 1 == parity, "waits for ever, or not at all"


def _copy(source: Descriptor, at: list[int], barrier: Barrier, target: Shared, pred: bool = True) -> None:
    if not pred:
        return
    box = list(zip(at, source.block_shape, strict=True))
    tile = torch.zeros(source.block_shape).to(source.memory.dtype)
    there = source.memory[tuple(slice(begin, begin + size) for begin, size in box)]
    tile[tuple(slice(size) for size in there.shape)] = there
    assert target.shape == list(tile.shape), "the box and its place in shared memory differ"
    target.memory.copy_(tile)
    barrier.missing -= tile.nbytes
    assert barrier.missing >= 0, "more bytes than expected"


@dataclass
class Accumulator:
    """Sums, and products in flight: when they were issued, and their operands."""

    sums: Any
    pending: list[tuple[int, Any, Shared]] = field(default_factory=list)


class _TensorCores:
    """Products run in the order in which they were issued, whatever they are added to."""

    def __init__(self) -> None:
        self._issued = 0

    def product(self, first: Any, second: Shared, acc: Any, is_async: bool) -> Accumulator:
        """`warpgroup_mma`."""
        assert is_async
        self._issued += 1
        made = acc if isinstance(acc, Accumulator) else Accumulator(acc)
        return Accumulator(made.sums, [*made.pending, (self._issued, first, second)])

    def wait(self, outstanding: int, deps: Any) -> Any:
        """`warpgroup_mma_wait`."""
        waited = tuple(self._waited(acc, self._issued - outstanding) for acc in deps)
        return waited[0] if len(waited) == 1 else waited

    def _waited(self, acc: Any, last: int) -> Any:
        if not isinstance(acc, Accumulator):
            return acc
        sums = acc.sums
        for _, first, second in (each for each in acc.pending if each[0] <= last):
            first = first.memory if isinstance(first, Shared) else first
            sums = sums + first.float() @ second.memory.float()
        rest = [each for each in acc.pending if each[0] > last]
        return Accumulator(sums, rest) if rest else values(sums)


def _halves(word: torch.Tensor) -> torch.Tensor:
    """Words [...] as fp32 [..., 2] from their halves, bf16."""
    return torch.stack((word & 0xFFFF, word >> 16), -1).to(torch.int32).to(torch.int16).view(torch.bfloat16).float()


def _word(halves: torch.Tensor) -> torch.Tensor:
    bits = halves.bfloat16().contiguous().view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | (bits[..., 1] << 16)


def _bytes(pair: torch.Tensor, selector: int) -> torch.Tensor:
    """Four bytes of two words."""
    chosen = [(pair >> 8 * (selector >> 4 * at & 7) & 0xFF) << 8 * at for at in range(4)]
    return chosen[0] | chosen[1] | chosen[2] | chosen[3]


_PTX: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c, 0x6A: (a & b) ^ c}[table],
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": lambda a, b, selector: _bytes(a | (b << 32), selector),
    "shr.b32": lambda a, count: a >> count,
    "shl.b32": lambda a, count: (a << count) & 0xFFFFFFFF,
    "sub.bf16x2": lambda a, b: _word(_halves(a) - _halves(b)),
    "mul.bf16x2": lambda a, b: _word(_halves(a) * _halves(b)),
    "fma.rn.bf16x2": lambda a, b, c: _word(_halves(a).double() * _halves(b).double() + _halves(c).double()),
}


def inline_asm(text: str, constraints: str, args: list[Any], dtypes: Any, *, is_pure: bool, pack: int) -> Any:
    """Of 4 elements in a row at a time, in words: bytes, or pairs of bf16."""
    assert is_pure
    assert pack == 4
    shape = torch.broadcast_shapes(*(arg.shape for arg in args))
    several = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    outputs = constraints.count("=")
    assert outputs == 2 * len(several)
    words: list[torch.Tensor] = []
    for arg in args:
        four = arg.as_subclass(torch.Tensor).broadcast_to(shape).contiguous().view(*shape[:-1], shape[-1] // 4, 4)
        if arg.dtype == torch.bfloat16:
            words += [_word(four[..., :2]), _word(four[..., 2:])]
        else:
            parts = four.view(torch.uint8).long()
            words.append(sum((parts[..., at] << 8 * at for at in range(4)), torch.zeros_like(parts[..., 0])))
    registers: dict[str, Any] = {f"${outputs + at}": word for at, word in enumerate(words)}

    def value(name: str) -> Any:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for instruction in re.findall(r"^\s*([a-z0-9]+(?:\.[a-z0-9]+)+) (.*);$", text, re.MULTILINE):
        operation, (target, *sources) = instruction[0], instruction[1].split(", ")
        made = _PTX[operation](*map(value, sources))
        registers[target] = made if isinstance(made, torch.Tensor) else torch.tensor(made).expand_as(words[0])
    made = [_halves(registers[f"${at}"]) for at in range(outputs)]
    found = tuple(
        values(torch.cat(made[2 * at : 2 * at + 2], -1).reshape(shape).to(dtype)) for at, dtype in enumerate(several)
    )
    return found if isinstance(dtypes, tuple) else found[0]


def _allocate(dtype: Any, shape: list[int], layout: object) -> Any:
    if layout == "barrier":
        return Barriers(shape[0])
    return Shared(torch.full(shape, 77, dtype=torch.uint8).to(dtype.dtype if isinstance(dtype, ElementType) else dtype))


def _copy_elements(target: Shared, source: Pointer, mask: Any) -> None:
    """A copy by threads, which writes zeros in place of what is masked (cp.async with a source of no bytes)."""
    target.memory.copy_(load(source, mask))


def _product_of_registers(first: Any, second: Any, acc: Any) -> Any:
    """`mma_v2`."""
    return values(acc + first.float() @ second.float())


def _largest(tensor: Any, axis: int) -> Any:
    return values(tensor.amax(axis))


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    return values(torch.where(condition, torch.as_tensor(a), torch.as_tensor(b)))


def _language(program: tuple[int, ...]) -> SimpleNamespace:
    nothing = lambda *_, **__: None  # noqa: E731 - a layout, a fence, a barrier of threads
    layouts = (
        "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout", "DistributedLinearLayout",
        "NVMMASharedLayout", "SwizzledSharedLayout",
    )  # fmt: skip
    return SimpleNamespace(
        **dict.fromkeys((*layouts, "thread_barrier", "assume"), nothing),
        float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16, int16=torch.int16, int64=torch.int64,
        int8=torch.int8, uint8=torch.uint8,
        program_id=lambda axis: program[axis],
        arange=lambda begin, end, layout: values(torch.arange(begin, end)),
        zeros=lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)),
        zeros_like=lambda tensor: values(torch.zeros_like(tensor)),
        num_warps=lambda: 4,
        sum=lambda tensor, axis: values(tensor.sum(axis)),
        max=_largest,
        rsqrt=torch.rsqrt,
        exp=torch.exp,
        exp2=torch.exp2,
        expand_dims=lambda tensor, axis: tensor.unsqueeze(axis),
        atomic_add=_add,
        minimum=lambda a, b: a.clamp(max=b) if isinstance(a, torch.Tensor) else min(a, b),
        maximum=lambda a, b: torch.maximum(a, b) if isinstance(a, torch.Tensor) else max(a, b),
        where=_where,
        static_range=range,
        load=load,
        store=store,
        reshape=lambda tensor, shape: tensor.reshape(shape),
        permute=lambda tensor, order: tensor.permute(order),
        join=lambda first, second: torch.stack((first, second), -1),
        split=lambda tensor: tensor.unbind(-1),
        convert_layout=lambda tensor, layout, assert_trivial=False: tensor,
        inline_asm_elementwise=inline_asm,
        allocate_shared_memory=_allocate,
    )  # fmt: skip


def _unit(dtype: Any) -> float:
    """`widening.unit_of`, of torch's types."""
    dtype = dtype.dtype if isinstance(dtype, ElementType) else dtype
    return 1.0 if dtype.itemsize > 1 else 2.0**120 if dtype.is_floating_point else 64.0


def run_kernel(module: types.ModuleType, name: str, grid: tuple[int, int, int], *args: Any, **constants: Any) -> None:
    """Compute all programs of a Gluon kernel of a module; tensors are `Pointer`s, descriptors `Descriptor`s."""
    for program in itertools.product(*map(range, grid)):
        scope: dict[str, Any] = {"gl": _language(program), "_value_layout": lambda: None}
        scope["tma"] = SimpleNamespace(async_copy_global_to_shared=_copy)
        scope["mbarrier"] = SimpleNamespace(
            init=lambda barrier, count: None, expect=_expect, wait=_wait, MBarrierLayout=lambda: "barrier"
        )
        scope["async_copy"] = SimpleNamespace(
            async_copy_global_to_shared=_copy_elements, commit_group=lambda: None, wait_group=lambda count: None
        )
        cores = _TensorCores()
        scope |= {"warpgroup_mma": cores.product, "mma_wait": cores.wait, "fence_async_shared": lambda: None}
        scope["mma_v2"] = _product_of_registers
        functions = [value for value in vars(module).values() if type(value).__name__ == "GluonJITFunction"]
        others = {value.fn.__module__: value.fn.__globals__ for value in functions}
        for key, value in [pair for names in (*others.values(), vars(module)) for pair in names.items()]:
            if type(value).__name__ == "constexpr":
                scope[key] = Constant(value.value) if isinstance(value.value, int) else value.value
            elif type(value).__name__ == "GluonJITFunction":
                scope[key] = types.FunctionType(value.fn.__code__, scope, key, value.fn.__defaults__)
        scope |= {"_panel_layout": lambda *_: None, "unit_of": _unit, "launch_dependents": lambda: None}
        scope["grid_dependency_wait"] = lambda: None
        scope["range"] = range
        scope["__builtins__"] = __builtins__
        scope[name](*args, **constants)
