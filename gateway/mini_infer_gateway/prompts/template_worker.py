"""A process that renders untrusted chat templates with limits of memory and time: if it dies, one request is lost.

It reads a request from its input and writes the rendered prompts to its output, one request after the other. Each
message is its length in four bytes and MessagePack. The process opens no files, and knows only the template and the one
request.
"""

import resource
import struct
import sys
from collections import OrderedDict
from typing import Any, BinaryIO, Literal

import msgspec

from mini_infer_gateway.prompts import prompt_keys
from mini_infer_prompts.image_prompts import image_prompts
from mini_infer_prompts.image_sources import ImageSource
from mini_infer_prompts.prompt import ChatTemplates, PromptText
from mini_infer_prompts.template_budget import TemplateBudgetError
from mini_infer_web.api_errors import ApiError

LENGTH = struct.Struct("<I")
TEMPLATES_KEPT = 8
READERS = {
    reader.__name__: reader
    for reader in (
        *(prompt_keys.chat_prompts, prompt_keys.batch_prompts, prompt_keys.invocation_prompts),
        *(prompt_keys.message_prompts, prompt_keys.response_prompts),
    )
}
"""Readers of prompts that render a template."""


_LIMITS: tuple[tuple[type[Exception], Literal["memory", "time"]], ...] = (
    (MemoryError, "memory"),
    (TemplateBudgetError, "time"),
)
_NONE: Literal[""] = ""


class RenderRequest(msgspec.Struct):
    """A request to render one body."""

    revision: str
    reader: str
    """Name of a reader in READERS."""
    body: dict[str, Any]
    templates: dict[str, str]
    """Template sources by name."""
    special_tokens: dict[str, str]
    image_files: dict[str, str]
    """Files that say how the model reads images; empty if it reads none."""
    cpu_s: int
    """CPU seconds for this request, after which the process is killed."""


class RenderedPrompt(msgspec.Struct):
    """A prompt: a text, or token ids."""

    text: str = ""
    add_special_tokens: bool = False
    ids: list[int] | None = None
    images: list[str] = []
    """URLs of the images of a text."""

    @classmethod
    def of(cls, prompt: PromptText | list[int]) -> "RenderedPrompt":
        """Converts a prompt as a reader returns it."""
        if not isinstance(prompt, PromptText):
            return cls(ids=prompt)
        return cls(prompt.text, prompt.add_special_tokens, images=[image.url for image in prompt.images])

    @property
    def prompt(self) -> PromptText | list[int]:
        """The prompt as a reader returns it."""
        if self.ids is not None:
            return self.ids
        return PromptText(self.text, self.add_special_tokens, tuple(ImageSource((), url) for url in self.images))


class RenderAnswer(msgspec.Struct):
    """The result of a request."""

    prompts: list[RenderedPrompt] = []
    error: str = ""
    """The error by which the template or the reader rejects the body; "" if it is accepted."""
    limit: Literal["", "memory", "time"] = ""
    """The limit that the template exceeded; "" if none."""


def main() -> None:
    """Serves the parent until it closes the pipe. The argument is the memory limit in bytes."""
    _limit(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Serves until there are no more requests."""
    answers.write(LENGTH.pack(0))  # It is up.
    answers.flush()
    decoder, cache = msgspec.msgpack.Decoder(RenderRequest), OrderedDict[str, ChatTemplates]()
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        request = decoder.decode(requests.read(LENGTH.unpack(head)[0]))
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = int(used.ru_utime + used.ru_stime) + 1 + request.cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        answer = msgspec.msgpack.encode(_rendered(request, cache))
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _rendered(request: RenderRequest, cache: OrderedDict[str, ChatTemplates]) -> RenderAnswer:
    try:
        if (templates := cache.get(request.revision)) is None:
            templates = cache[request.revision] = ChatTemplates(
                request.templates, request.special_tokens, images=image_prompts(request.image_files)
            )
            while len(cache) > TEMPLATES_KEPT:
                cache.popitem(last=False)
        found = READERS[request.reader](templates, request.body)
        return RenderAnswer([RenderedPrompt.of(one) for one in found])
    except (ApiError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        # A rendering's own errors come as refusals with their cause.
        limit = next((word for kind, word in _LIMITS if isinstance(error.__cause__, kind)), _NONE)
        return RenderAnswer(error=str(error)[:1000] or type(error).__name__, limit=limit)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    main()
