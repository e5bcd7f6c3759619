"""Thinking at the beginning of an output. Where the prompt has opened it already, the output begins within."""

from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ReasoningFormat


def prompt_opens(markers: ReasoningFormat, prompt_end: str) -> bool:
    """Whether the last words of a prompt leave thinking open: a template's, or a message's that is to be continued."""
    return prompt_end.rstrip().endswith(markers.begin)


def read_reasoning(source: TextSource, sink: Sink, markers: ReasoningFormat, begins_inside: bool) -> Waiting[None]:
    """Tell the thinking, if the output begins with any; what follows it is not read."""
    if not begins_inside:
        space = yield from source.skip_space()
        if not (yield from source.accept(markers.begin)):
            sink.content(space)
            return
    sink.begin_reasoning()
    if begins_inside:
        yield from source.skip_space()
        yield from source.accept(markers.begin)  # some models open it again
    if (yield from source.through([markers.end], sink.reasoning)) is not None:
        sink.end_reasoning()
