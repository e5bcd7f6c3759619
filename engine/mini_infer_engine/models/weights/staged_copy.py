"""Copies tensors of files to a GPU through pinned memory, so that several threads read while the GPU receives.

A plain copy of pageable memory waits for the device, one thread after the other.
"""

import threading

import numpy as np
import torch
from torch import Tensor

_CHUNK_BYTES = 4 << 20
_BUFFERS = 2
"""Buffers of a thread: one is filled while the other is sent."""


class StagedCopies:
    """Copies of several threads to one GPU. Call `finish` in each thread before others read what was copied."""

    def __init__(self, device: torch.device) -> None:
        """Waits for the device: other streams write to memory that was allocated before."""
        self._device = device
        self._local = threading.local()
        torch.cuda.synchronize(device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Fills a target on the GPU, in this thread's stream, with a tensor of main memory."""
        if source.dtype != target.dtype or not source.is_contiguous() or not target.is_contiguous():
            target.copy_(source)
            return
        to_device, read = (tensor.detach().view(-1).view(torch.uint8) for tensor in (target, source))
        stream, buffers = self._of_thread()
        values = read.numpy()
        with torch.cuda.stream(stream):
            for begin in range(0, len(values), _CHUNK_BYTES):
                part = values[begin : begin + _CHUNK_BYTES]
                buffer, sent = buffers[begin // _CHUNK_BYTES % _BUFFERS]
                sent.synchronize()
                staged = buffer[: len(part)]
                np.copyto(staged.numpy(), part)
                to_device[begin : begin + len(part)].copy_(staged, non_blocking=True)
                sent.record()

    def finish(self) -> None:
        """Waits for the copies of this thread."""
        self._of_thread()[0].synchronize()

    def _of_thread(self) -> tuple[torch.cuda.Stream, list[tuple[Tensor, torch.cuda.Event]]]:
        if not hasattr(self._local, "parts"):
            buffers = [
                (torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]  # torch's
                for _ in range(_BUFFERS)
            ]
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
            self._local.parts = stream, buffers
        parts: tuple[torch.cuda.Stream, list[tuple[Tensor, torch.cuda.Event]]] = self._local.parts
        return parts
