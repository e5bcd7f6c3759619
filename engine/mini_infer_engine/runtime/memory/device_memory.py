"""Owns what an engine keeps on its device: weights, KV cache, CUDA graphs and scratch memory, by tag.

Allocations are recorded while an engine starts, so that a pass pays nothing for it. A tag's memory can be given back as
a whole. This file knows neither models nor pages.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

_MADV_REMOVE = 9
"""Advice of madvise(2) that frees pages of shared memory; Python's mmap has a method for its own mappings alone."""


class MemoryTag(StrEnum):
    """The uses of a device's memory. vLLM's sleep mode has the first two."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    RECURRENT_STATE = "recurrent_state"
    """Slots of running sequences and checkpoints, where layers have a state instead of keys and values."""
    GRAPHS = "graphs"
    """Memory that captured CUDA graphs share. torch frees it with the last of them."""
    WORKSPACE = "workspace"
    """State of the slots, and scratch memory that passes reuse; on a GPU also a draft model's pages."""


class DeviceMemory:
    """The owner of the memory that one engine keeps on one device. It keeps no tensor alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[MemoryTag, StorageWeakRef]] = {}
        """Tag of each storage, by the storage's address, which stays its own as long as there is a weak reference."""
        self._opaque: list[tuple[MemoryTag, weakref.ref[Tensor]]] = []
        """Tensors without a storage, such as weights in oneDNN's blocked order."""
        self._measured = dict.fromkeys(MemoryTag, 0)

    def own(self, tag: MemoryTag, tensors: Iterable[Tensor]) -> None:
        """Records tensors of this device under a tag, also those that torch did not allocate. The first tag of a
        storage stays its tag.
        """
        for tensor in tensors:
            if tensor.device.type != self._device.type:
                continue  # such as pinned memory of a GPU's engine
            if tensor.layout != torch.strided:
                self._opaque.append((tag, weakref.ref(tensor)))
            else:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch leaves it untyped
                self._storages.setdefault(storage._cdata, (tag, reference))

    @contextmanager
    def tag(self, tag: MemoryTag) -> Iterator[None]:
        """Records everything that torch allocates on the device in this block, by this thread, under a tag."""
        with _Allocations(lambda tensor: self.own(tag, [tensor])):
            yield

    @contextmanager
    def measure(self, tag: MemoryTag) -> Iterator[None]:
        """Counts the memory that a GPU's allocator reserves in this block and retains after it: that of CUDA graphs has
        no tensors. It counts nothing on a CPU.
        """
        if self._device.type != "cuda":
            yield
            return
        before = self._reserved()
        yield
        self._measured[tag] += max(0, self._reserved() - before)

    def release(self, tag: MemoryTag) -> int:
        """Gives the memory of a tag back to the device, and returns its bytes. No pass may read it afterwards.

        Opaque tensors are freed by their owners alone, and memory that was measured with its CUDA graphs.
        """
        owned = [key for key, (its_tag, _) in self._storages.items() if its_tag is tag]
        freed = sum(_free(self._storages.pop(key)[1]) for key in owned)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def _reserved(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def bytes_by_tag(self) -> dict[str, int]:
        """Returns the bytes of each tag that are in use now, those of unused ones too."""
        totals = {tag.value: num_bytes for tag, num_bytes in self._measured.items()}
        for tag, reference in self._storages.values():
            if (storage := _storage(reference)) is not None:
                totals[tag] += storage.nbytes()
        for tag, weak in self._opaque:
            if (tensor := weak()) is not None:
                totals[tag] += tensor.numel() * tensor.itemsize
        return totals

    def __str__(self) -> str:
        """Returns the sizes in words, for the log."""
        sizes = self.bytes_by_tag().items()
        parts = [f"{tag.replace('_', ' ')} {size / 1e9:.2f} GB" for tag, size in sizes if size]
        return f"{self._device}: {', '.join(parts)}"


class _Allocations(TorchFunctionMode):
    """Records the storages that functions of torch make, not those of their arguments.

    A `TorchDispatchMode` would see the operators inside of them, too, but imports sympy: a second of each start.
    """

    def __init__(self, record: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _strided((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _strided(result):
            if tensor.untyped_storage()._cdata not in given:
                self._record(tensor)
        return result


def _strided(values: Any) -> Iterator[Tensor]:
    """Yields the tensors with a storage among the arguments or results of a function."""
    if isinstance(values, Tensor):
        if values.layout == torch.strided:
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _strided(value)
    elif isinstance(values, dict):
        yield from _strided(list(values.values()))


def _storage(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Returns the storage, or None if it was freed."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


def _free(reference: StorageWeakRef) -> int:
    """Frees the memory of a storage that is still in use. Returns its bytes; 0 if none were left.

    Memory that torch did not allocate keeps its addresses and loses its pages: it reads as zeros.
    """
    if (storage := _storage(reference)) is None:
        return 0
    num_bytes = storage.nbytes()
    if storage.resizable():
        storage.resize_(0)
        return num_bytes
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    whole_pages = (storage.data_ptr() + num_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    area = ctypes.c_void_p(begin), ctypes.c_size_t(max(0, whole_pages))
    # Shared memory knows the first advice alone, private memory the second.
    is_freed = madvise(*area, _MADV_REMOVE) == 0 or madvise(*area, mmap.MADV_DONTNEED) == 0
    return num_bytes if is_freed else 0
