"""Reads tensors that are stored as they are computed with straight into a model's memory, in large pieces.

To a GPU they go through pinned buffers of several threads, so that files are read while the GPU receives. A thread
needs the interpreter a few times for each piece only: another one loads kernels meanwhile.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError

_PIECE_BYTES = 16 << 20
_MOST_THREADS = 8
_BUFFERS = 2
"""Buffers of a thread: one is filled while the other is sent."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file, and the memory that it fills, which has its dtype and is contiguous."""

    target: Tensor
    file: Path
    begin: int
    """Offset of its first byte."""


@dataclass(frozen=True, slots=True)
class _Piece:
    target: Tensor  # [bytes] uint8, on the device
    descriptor: int
    begin: int
    file: Path


def read_directly(tensors: Sequence[FileTensor], device: torch.device, count: Callable[[int], object]) -> None:
    """Fills the tensors, all on this device, and calls `count` with the bytes of each piece from several threads.

    Raises:
        ModelError: a file is shorter than it was, or cannot be read.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams fill what this one has allocated
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        try:
            for file in {tensor.file for tensor in tensors}:
                descriptors[file] = os.open(file, os.O_RDONLY)
                stack.callback(os.close, descriptors[file])
        except OSError as error:
            raise ModelError(f"{error.filename} cannot be read ({error.strerror}).") from None
        pieces = deque(_pieces(tensors, descriptors))
        threads = min(_MOST_THREADS, os.cpu_count() or 1, len(pieces))
        if not threads:
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="weights-read") as pool:
            jobs = [pool.submit(_read_some, pieces, device, count) for _ in range(threads)]
        for job in jobs:
            job.result()


def _pieces(tensors: Sequence[FileTensor], descriptors: dict[Path, int]) -> Iterator[_Piece]:
    for tensor in tensors:
        target = tensor.target.detach().reshape(-1).view(torch.uint8)
        for begin in range(0, target.numel(), _PIECE_BYTES):
            part = target[begin : begin + _PIECE_BYTES]
            yield _Piece(part, descriptors[tensor.file], tensor.begin + begin, tensor.file)


def _read_some(pieces: deque[_Piece], device: torch.device, count: Callable[[int], object]) -> None:
    """Reads pieces until none is left. After a fault the other threads find none any more."""
    try:
        # The caller's mode is its thread's alone, and views that were made in it may not be written to without it.
        with torch.inference_mode(), _reader(device) as read:
            while (piece := _next(pieces)) is not None:
                read(piece)
                count(piece.target.numel())
    except BaseException:
        pieces.clear()
        raise


def _next(pieces: deque[_Piece]) -> _Piece | None:
    try:
        return pieces.popleft()
    except IndexError:
        return None


@contextmanager
def _reader(device: torch.device) -> Iterator[Callable[[_Piece], None]]:
    """Gives a function by which one thread reads pieces; they are complete when the block ends."""
    if device.type != "cuda":
        yield lambda piece: _fill(piece, piece.target)
        return
    torch.cuda.set_device(device)
    stream, buffers = torch.cuda.Stream(device), _buffers()  # type: ignore[no-untyped-call]  # torch's
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    turn = 0

    def read(piece: _Piece) -> None:
        nonlocal turn
        buffer, sent = buffers[turn]
        turn = (turn + 1) % len(buffers)
        sent.synchronize()
        part = buffer[: piece.target.numel()]
        _fill(piece, part)
        with torch.cuda.stream(stream):
            piece.target.copy_(part, non_blocking=True)
            sent.record(stream)

    with ExitStack() as stack:
        for buffer, _ in buffers:  # torch's own pinned memory would stay pinned
            torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
            stack.callback(cudart.cudaHostUnregister, buffer.data_ptr())
        stack.callback(stream.synchronize)
        yield read


def _buffers() -> list[tuple[Tensor, torch.cuda.Event]]:
    """Returns the buffers of a thread, each with the event after which it is free; waiters sleep."""
    return [
        (torch.empty(_PIECE_BYTES, dtype=torch.uint8), torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        for _ in range(_BUFFERS)
    ]


def _fill(piece: _Piece, memory: Tensor) -> None:
    """Fills main memory [bytes] uint8 from the file."""
    view, done = memory.numpy().data, 0
    while done < len(view):
        try:
            size = os.preadv(piece.descriptor, [view[done:]], piece.begin + done)
        except OSError as error:
            raise ModelError(f"{piece.file} cannot be read ({error.strerror}).") from None
        if not size:
            raise ModelError(f"{piece.file} is shorter than its header says: download it again.")
        done += size
