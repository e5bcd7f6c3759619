"""Thinking at the beginning of an output. Where the prompt has opened it already, the output begins within."""

from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ReasoningFormat


def begins_inside(markers: ReasoningFormat, continued_text: str, prompt_end: str) -> bool:
    """Whether an output begins within thinking: the template has opened it, or the message that is to be continued.

    What stands further up in the prompt says nothing: a user may have written the marker.
    """
    is_open = continued_text.rfind(markers.begin) > continued_text.rfind(markers.end)
    return is_open or prompt_end.rstrip().endswith(markers.begin)


def read_reasoning(source: TextSource, sink: Sink, markers: ReasoningFormat, is_inside: bool) -> Waiting[None]:
    """Tell the thinking, if the output begins with any; what follows it is not read."""
    if not is_inside:
        space = yield from source.skip_space()
        if not (yield from source.accept(markers.begin)):
            sink.content(space)
            return
    sink.begin_reasoning()
    if is_inside:
        yield from source.skip_space()
        yield from source.accept(markers.begin)  # some models open it again
    if (yield from source.through([markers.end], sink.reasoning)) is not None:
        sink.end_reasoning()
