"""Manages the processes that decode images: few, started with the first image, replaced if one ends.

A process that takes too long or too much memory ends, and its image is refused.
"""

import math
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from mini_infer_engine.text.images.decoder_process import LENGTH, DecodeAnswer, DecodeRequest, Processor
from mini_infer_prompts.image_files import ImageFile
from mini_infer_prompts.image_prompts import ImageError, ImagePrompts

WORKERS = 2
DECODE_TIMEOUT_S = 30.0
"""Seconds for one image, in which its process has to answer."""
START_TIMEOUT_S = 120.0
MEMORY_BYTES = 3 << 30
"""Most memory of one process; an image of `MAX_IMAGE_PIXELS` takes a gigabyte."""
_MAX_ANSWER_BYTES = 1 << 16
_VALUE_BYTES = 4
_MODULE = "mini_infer_engine.text.images.decoder_process"
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""All environment variables that a process receives: no secret of ours is accessible to an image."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """The values of an image, as the model's image processor makes them."""

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    """Patches in time, height and width; empty if they follow from the shape."""
    values: bytes
    """Packed fp32 in row-major order."""


class _LostError(Exception):
    """The process has ended while it worked."""


class ImageDecoders:
    """The processes of one model. Threads may share it."""

    def __init__(
        self, images: ImagePrompts, *, timeout_s: float = DECODE_TIMEOUT_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        processor = msgspec.msgpack.encode(Processor(images.family, dict(images.processor)))
        self._timeout_s = timeout_s
        self._idle: queue.SimpleQueue[_Decoder] = queue.SimpleQueue()
        decoders = [_Decoder(processor, memory_bytes) for _ in range(WORKERS)]
        for decoder in decoders:
            self._idle.put(decoder)
        weakref.finalize(self, _end_all, decoders)

    def decode(self, file: ImageFile, num_values: int) -> DecodedImage:
        """Returns the values of an image, so many; it waits for an idle process.

        Raises ImageError if the image is refused, RuntimeError if no process can be started.
        """
        decoder = self._idle.get()
        try:
            return decoder.decode(file, num_values, self._timeout_s)
        except _LostError:
            raise ImageError(
                f"is an image that takes more than {self._timeout_s:g} s or too much memory to decode: scale it down"
            ) from None
        finally:
            self._idle.put(decoder)


class _Decoder:
    """One process, which is started when it is needed."""

    def __init__(self, processor: bytes, memory_bytes: int) -> None:
        self._processor, self._memory_bytes = processor, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, file: ImageFile, num_values: int, timeout_s: float) -> DecodedImage:
        request = msgspec.msgpack.encode(DecodeRequest(file.data, file.digest, file.width, file.height))
        process = self._process or self._start()
        with self._ended_after(process, timeout_s):
            _send(process, request)
            answer = _answer(process)
            if answer.error:
                raise ImageError(answer.error)
            # An image that has taken the process over can write anything.
            if answer.num_bytes != _VALUE_BYTES * num_values or math.prod(answer.shape) != num_values:
                raise _LostError
            return DecodedImage(tuple(answer.shape), tuple(answer.grid), _read(process, answer.num_bytes))

    @contextmanager
    def _ended_after(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> Iterator[None]:
        """Ends the process if the block takes longer, or it has ended itself. Raises _LostError then."""
        timer = threading.Timer(timeout_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, msgspec.MsgspecError, _LostError):
            self.end()
            raise _LostError from None
        finally:
            timer.cancel()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        try:
            with self._ended_after(process, START_TIMEOUT_S):
                _send(process, self._processor)
                _answer(process)
        except _LostError:
            raise RuntimeError("the process that decodes images cannot be started; its output says why") from None
        return process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not written yet cannot be
                    if pipe is not None:
                        pipe.close()


def _end_all(decoders: list[_Decoder]) -> None:
    for decoder in decoders:
        decoder.end()


def _send(process: "subprocess.Popen[bytes]", message: bytes) -> None:
    if process.stdin is None:
        raise _LostError
    process.stdin.write(LENGTH.pack(len(message)))
    process.stdin.write(message)
    process.stdin.flush()


def _answer(process: "subprocess.Popen[bytes]") -> DecodeAnswer:
    (length,) = LENGTH.unpack(_read(process, LENGTH.size))
    if length > _MAX_ANSWER_BYTES:
        raise _LostError
    return msgspec.msgpack.decode(_read(process, length), type=DecodeAnswer)


def _read(process: "subprocess.Popen[bytes]", size: int) -> bytes:
    data = b"" if process.stdout is None else process.stdout.read(size)
    if len(data) < size:
        raise _LostError
    return data
