"""Parses reasoning at the beginning of an output. If the prompt has opened it already, the output begins within.

Some models call tools without having ended their reasoning: a call ends it.
"""

from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import CallOpening, ReasoningFormat


def begins_inside(markers: ReasoningFormat, continued_text: str, prompt_end: str) -> bool:
    """True if an output begins within reasoning: the template has opened it, or the message that is to be continued.

    Text further up in the prompt says nothing: a user may have written the marker.
    """
    is_open = continued_text.rfind(markers.begin) > continued_text.rfind(markers.end)
    return is_open or prompt_end.rstrip().endswith((markers.begin, (markers.begin + markers.label).rstrip()))


def read_reasoning(
    source: TextSource, sink: Sink, markers: ReasoningFormat, is_inside: bool, call: CallOpening | None = None
) -> Waiting[None]:
    """Emits the reasoning, if the output begins with any; what follows it is not read, nor is a call that ends it."""
    if not is_inside:
        space = yield from source.skip_space()
        if not (yield from source.accept(markers.begin)):
            sink.content(space)
            return
    sink.begin_reasoning()
    if is_inside:
        yield from source.skip_space()
        yield from source.accept(markers.begin)  # some models open it again
    if markers.label:
        yield from source.skip_space()
        yield from source.accept_end(markers.label)
    ends = [markers.end] if call is None else [markers.end, call.marker]
    while (marker := (yield from source.until(ends, sink.reasoning))) is not None:
        if call is None or marker == markers.end:
            source.take(len(marker))
            break
        if (yield from source.is_followed(marker, call.next_text)):
            break
        sink.reasoning(source.take(len(marker)))  # only a mention
    if marker is not None:
        sink.end_reasoning()
