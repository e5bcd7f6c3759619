"""A process that decodes images with limits of memory and time: if a hostile one ends it, one request is lost.

It reads requests from its input and writes answers to its output, one after the other: first a `Processor`, then
`DecodeRequest`s. Each message is its length and MessagePack; the values of an image follow its answer as they are. The
image processors are transformers' own, which need no torch in their PIL form.
"""

import resource
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import msgspec

from mini_infer_prompts.image_files import ImageFile, decoded_image
from mini_infer_prompts.image_prompts import ImageError

LENGTH = struct.Struct("<I")
"""The length of a message."""
CPU_S = 20
"""Most seconds of CPU time for one image."""


class Processor(msgspec.Struct):
    """The image processor of a model."""

    family: str
    values: dict[str, Any]
    """The values of its file."""


class DecodeRequest(msgspec.Struct):
    """One image as a file."""

    data: bytes
    digest: bytes
    width: int
    height: int


class DecodeAnswer(msgspec.Struct):
    """The result of a request."""

    shape: list[int] = []
    grid: list[int] = []
    """Patches in time, height and width; empty if they follow from the shape."""
    num_bytes: int = 0
    """Bytes of the values that follow."""
    error: str = ""
    """The reason why the image is refused; "" if it is not."""


def main() -> None:
    """Serves the parent until it closes the pipe. The argument is the memory limit in bytes."""
    memory_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # Neither is needed, and importing both would take two seconds and half a gigabyte.
    hidden = cast("dict[str, object]", sys.modules)
    hidden["torch"] = hidden["torchvision"] = None
    serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Serves until there are no more requests."""
    process = image_processor(msgspec.msgpack.decode(_message(requests) or b"", type=Processor))
    _answer(answers, DecodeAnswer())  # It is up.
    decoder = msgspec.msgpack.Decoder(DecodeRequest)
    while (message := _message(requests)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
        answer, values = _processed(decoder.decode(message), process)
        _answer(answers, answer, values)


def image_processor(processor: Processor) -> Callable[[Any], Any]:
    """Returns transformers' image processor, as a function of one image in PIL's form."""
    values = dict(processor.values)
    if processor.family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        gemma = Gemma3ImageProcessorPil.from_dict(values)
        # Off by default in transformers' Gemma3Processor, whatever the file says.
        return lambda image: gemma([image], return_tensors="np", do_pan_and_scan=False)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    # It changes the sizes that it is given, and those of its class.
    values["size"] = dict(values.get("size") or Qwen2VLImageProcessorPil.size)
    qwen = Qwen2VLImageProcessorPil.from_dict(values)
    return lambda image: qwen([image], return_tensors="np")


def _processed(request: DecodeRequest, process: Callable[[Any], Any]) -> tuple[DecodeAnswer, memoryview | None]:
    """Returns the answer, and the values of the image; None if it is refused."""
    try:
        made = process(decoded_image(ImageFile(request.data, request.digest, request.width, request.height)))
    except ImageError as error:
        return DecodeAnswer(error=str(error)), None
    except MemoryError:
        return DecodeAnswer(error="is an image that takes too much memory to decode: scale it down"), None
    except Exception as error:  # What a client sends may make any library below fail in its own way.
        return DecodeAnswer(error=f"is an image that cannot be read ({type(error).__name__}): save it again"), None
    pixels = made["pixel_values"]
    grid = made["image_grid_thw"][0].tolist() if "image_grid_thw" in made else []
    values = memoryview(pixels.astype("<f4", order="C", copy=False)).cast("B")
    return DecodeAnswer([*pixels.shape], grid, values.nbytes), values


def _answer(answers: BinaryIO, answer: DecodeAnswer, values: memoryview | None = None) -> None:
    encoded = msgspec.msgpack.encode(answer)
    answers.write(LENGTH.pack(len(encoded)) + encoded)
    if values is not None:
        answers.write(values)
    answers.flush()


def _message(requests: BinaryIO) -> bytes | None:
    head = requests.read(LENGTH.size)
    return requests.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


if __name__ == "__main__":
    main()
