"""A process that renders chat templates of others, with limits of memory and time: its death costs one request.

It reads a request from its input and writes what it rendered to its output, one after the other; each message is its
length in four bytes and MessagePack. It opens nothing, and knows nothing but the template and the one request.
"""

import resource
import struct
import sys
from collections import OrderedDict
from typing import Any, BinaryIO, Literal

import msgspec

from mini_infer_gateway.prompts import prompt_keys
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
"""Those that render."""


_LIMITS: tuple[tuple[type[Exception], Literal["memory", "time"]], ...] = (
    (MemoryError, "memory"),
    (TemplateBudgetError, "time"),
)
_NONE: Literal[""] = ""


class RenderRequest(msgspec.Struct):
    """One body to be rendered."""

    revision: str
    reader: str
    """Of READERS."""
    body: dict[str, Any]
    templates: dict[str, str]
    """By name."""
    special_tokens: dict[str, str]
    cpu_s: int
    """After this much more processor time the process ends."""


class RenderedPrompt(msgspec.Struct):
    """A prompt: a text, or token ids."""

    text: str = ""
    add_special_tokens: bool = False
    ids: list[int] | None = None

    @classmethod
    def of(cls, prompt: PromptText | list[int]) -> "RenderedPrompt":
        """As a reader gives it."""
        return cls(*prompt) if isinstance(prompt, PromptText) else cls(ids=prompt)

    @property
    def prompt(self) -> PromptText | list[int]:
        """As a reader gives it."""
        return PromptText(self.text, self.add_special_tokens) if self.ids is None else self.ids


class RenderAnswer(msgspec.Struct):
    """What became of it."""

    prompts: list[RenderedPrompt] = []
    error: str = ""
    """Why the template, or whoever reads the body, refuses it; "": it does not."""
    limit: Literal["", "memory", "time"] = ""
    """What the template needs more of than it may have."""


def main() -> None:
    """Serves its parent until that closes the pipe. Arguments: bytes of memory."""
    _limit(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more requests."""
    answers.write(LENGTH.pack(0))  # It is up.
    answers.flush()
    decoder, known = msgspec.msgpack.Decoder(RenderRequest), OrderedDict[str, ChatTemplates]()
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        request = decoder.decode(requests.read(LENGTH.unpack(head)[0]))
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = int(used.ru_utime + used.ru_stime) + 1 + request.cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        answer = msgspec.msgpack.encode(_rendered(request, known))
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _rendered(request: RenderRequest, known: OrderedDict[str, ChatTemplates]) -> RenderAnswer:
    try:
        if (templates := known.get(request.revision)) is None:
            templates = known[request.revision] = ChatTemplates(request.templates, request.special_tokens)
            while len(known) > TEMPLATES_KEPT:
                known.popitem(last=False)
        found = READERS[request.reader](templates, request.body)
        return RenderAnswer([RenderedPrompt.of(one) for one in found])
    except (ApiError, ValueError) as error:
        # A rendering's own errors come as refusals with their cause.
        limit = next((word for kind, word in _LIMITS if isinstance(error.__cause__, kind)), _NONE)
        return RenderAnswer(error=str(error)[:1000] or type(error).__name__, limit=limit)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    main()
