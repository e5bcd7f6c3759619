"""Kernels under Triton's interpreter touch their arguments' memory alone, as `compute-sanitizer` sees to on a GPU."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


class OutOfBoundsError(Exception):
    """Where a GPU would read or write what is another tensor's, or nothing."""


_OF_POINTERS = frozenset(("_reduce", "_gather", "_pushed_sum", "_copy_pieces"))
"""Kernels of all_reduce/ and copy_pieces.py, whose tensors hold pointers to others."""


class Bounds:
    """Of one launch: its tensors' storages."""

    def __init__(self, kernel: str, arguments: Iterable[Any]) -> None:
        storages = {}
        self.is_counted = kernel not in _OF_POINTERS
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                storage = argument.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            elif isinstance(argument, tuple) or (hasattr(argument, "base") and hasattr(argument, "block_shape")):
                self.is_counted = False  # tensors within, and descriptors, which know their bounds
        begins = sorted(begin for begin in storages if begin)
        self.begins = np.array(begins, np.uint64)
        self.ends = np.array([begin + storages[begin] for begin in begins], np.uint64)

    def check(self, what: str, pointers: np.ndarray, size: int, mask: np.ndarray | None) -> None:
        """OutOfBoundsError: of `pointers` some that are not masked are not within one storage with their `size`."""
        touched = np.asarray(pointers, np.uint64).reshape(-1)
        if mask is not None:
            touched = touched[np.broadcast_to(mask, np.shape(pointers)).reshape(-1).astype(bool)]
        if not len(touched) or not self.is_counted:
            return
        at = np.searchsorted(self.begins, touched, side="right").astype(np.int64) - 1
        is_within = at >= 0
        is_within[is_within] &= touched[is_within] + np.uint64(size) <= self.ends[at[is_within]]
        if not is_within.all():
            place = touched[~is_within][0]
            near = int(np.abs(self.ends.astype(np.int64) - np.int64(place)).argmin())
            beyond = int(place) - int(self.ends[near])
            count = int((~is_within).sum())
            raise OutOfBoundsError(f"{what} of {count} elements, the first {beyond} bytes behind a storage")


def check_all_launches() -> None:
    """From now on, in this process."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    current: list[Bounds] = []
    init_arguments = executor._init_args_hst

    def init(self: Any, args: Any, kwargs: Any) -> Any:
        found = init_arguments(self, args, kwargs)
        current[:] = [Bounds(self.fn.__name__, [*found[0], *found[1].values()])]
        return found

    def size_of(handle: Any) -> int:
        return max(1, handle.dtype.element_ty.primitive_bitwidth // 8)

    load, store = builder.create_masked_load, builder.create_masked_store
    swap, update = builder.create_atomic_cas, builder.create_atomic_rmw

    def checked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **more: Any) -> Any:
        current[0].check("a read", ptrs.data, size_of(ptrs), mask.data)
        return load(self, ptrs, mask, other, *rest, **more)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        current[0].check("a write", ptrs.data, size_of(ptrs), mask.data)
        return store(self, ptrs, value, mask, *rest, **more)

    def checked_swap(self: Any, ptr: Any, *rest: Any) -> Any:
        current[0].check("an exchange", ptr.data, size_of(ptr), None)
        return swap(self, ptr, *rest)

    def checked_update(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current[0].check("an atomic update", ptr.data, size_of(ptr), mask.data)
        return update(self, op, ptr, value, mask, *rest)

    executor._init_args_hst = init
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_cas, builder.create_atomic_rmw = checked_swap, checked_update
