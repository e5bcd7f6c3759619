"""Parses tool calls in tags, in which each argument has a tag of its own: Qwen3-Coder's, GLM's, MiniMax's formats.

Values are texts without quotes (https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct); the function's schema says
which type they are in JSON. Texts are emitted as they come, other values when they are whole.
"""

import json

import msgspec

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_reader import Recorder
from mini_infer_engine.parsing.python_literals import as_json
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSink, TextSource, Waiting
from mini_infer_engine.parsing.tool_format import CallOpening, TaggedArguments, ToolCallFormat, ToolFormat
from mini_infer_engine.parsing.value_types import is_text, value_types


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of one format, without the white space that may stand between them."""

    begin: str
    """Marker in front of a call, or of several."""
    end: str
    before_name: str = ""
    after_name: str = ""
    """Text behind the name; if empty, the name ends where the first key or `end` follows."""
    call_end: str = ""
    """Text behind the arguments; if empty, `end` follows them."""
    before_key: str
    after_key: str
    before_value: str = ""
    value_end: str
    other_value_ends: tuple[str, ...] = ()
    """Texts that end a value which has not been closed."""
    has_lines: bool = False
    """True if a value stands on lines of its own; a line end at its beginning and at its end is none of it then."""


class TaggedFormat(ToolFormat):
    """A format of tool calls whose arguments stand in tags."""

    def __init__(self, tags: Tags, call_format: ToolCallFormat, ends_thinking: CallOpening | None = None) -> None:
        """Takes the texts that are parsed, the texts that the model was trained on, and what ends its reasoning."""
        self._tags = tags
        self.call_format = call_format
        self.ends_thinking = ends_thinking
        keys = (tags.before_key, tags.after_key, tags.before_value, tags.value_end)
        self.markers = (tags.begin, tags.end, *(text for text in keys if text.startswith("<") and text.endswith(">")))

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls and the answer around them. Some models leave out the outer markers: then the function must be
        one of the tools.
        """
        tags = self._tags
        by_name = {tool.name: tool for tool in tools}
        openings = [text for text in (tags.begin, tags.end, tags.before_name) if text]
        is_open = False
        while (marker := (yield from source.through(openings, sink.content))) is not None:
            if marker == tags.end:
                sink.content("" if is_open else tags.end)
                is_open = False
                continue
            lead = marker
            if marker == tags.begin:
                lead += yield from source.skip_space()
                if not (yield from source.accept(tags.before_name)):
                    sink.content(lead)
                    continue
                lead += tags.before_name
            name = yield from source.word()
            is_sure = marker == tags.begin or is_open or name in by_name
            if not name or not is_sure or not (yield from self._ends_name(source)):
                sink.content(lead + name)
                continue
            sink.begin_call(name)
            is_open = not (yield from self._read_call(source, sink, by_name.get(name)))

    def _ends_name(self, source: TextSource) -> Waiting[bool]:
        """Reads the text behind a name. Returns False if something else is there."""
        tags = self._tags
        if tags.after_name:
            return (yield from source.accept(tags.after_name))
        has_key = yield from source.is_followed("", tags.before_key)
        return has_key or (yield from source.is_followed("", tags.end))

    def _read_call(self, source: TextSource, sink: Sink, tool: Tool | None) -> Waiting[bool]:
        """Parses arguments and what ends the call. Returns True if `end` was read."""
        tags = self._tags
        schemas = tool.parameters.get("properties") if tool is not None else None
        opening = "{"
        while True:
            yield from source.skip_space()
            if not (yield from source.accept(tags.before_key)):
                break
            key = Recorder()
            if (yield from source.through((tags.after_key,), key)) is None:
                return False
            if tags.before_value:
                yield from source.skip_space()
                if not (yield from source.accept(tags.before_value)):
                    return False
            sink.arguments(f"{opening}{json.dumps(key.text.strip(), ensure_ascii=False)}: ")
            opening = ", "
            schema = schemas.get(key.text.strip()) if isinstance(schemas, dict) else None
            if not (yield from self._read_value(source, sink, value_types(schema))):
                return False
        is_whole = yield from source.accept_end(tags.call_end or tags.end)
        if is_whole or (yield from source.peek()):
            sink.arguments("{}" if opening == "{" else "}")
        yield from source.skip_space()
        return (yield from source.accept_end(tags.end)) if tags.call_end else is_whole

    def _read_value(self, source: TextSource, sink: Sink, types: set[str]) -> Waiting[bool]:
        """Parses one value. Returns False if the text ended within."""
        tags = self._tags
        ends = (tags.value_end, *tags.other_value_ends)
        if types <= {"string"}:
            value = _Text(sink.arguments, has_lines=tags.has_lines)
            sink.arguments('"')
            end = yield from source.until(ends, value)
            sink.arguments('"' if end is not None else "")
        else:
            whole = Recorder()
            end = yield from source.until(ends, whole)
            text = whole.text.removeprefix("\n").removesuffix("\n") if tags.has_lines else whole.text
            sink.arguments(_as_json(text, types) if end is not None else "")
        if end == tags.value_end:
            source.take(len(tags.value_end))
        return end is not None


class _Text:
    """Emits a text as the inside of a JSON string, without the line ends around it if it stands on its own lines."""

    def __init__(self, emit: TextSink, *, has_lines: bool) -> None:
        self._emit = emit
        self._has_lines = has_lines
        self._buffered = ""
        self._has_begun = False

    def __call__(self, text: str) -> None:
        if self._has_lines:
            text = self._without_outer_lines(text)
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def _without_outer_lines(self, text: str) -> str:
        """Buffers a line end at the end of the text so far."""
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        text = self._buffered + text
        self._buffered = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")


def _as_json(text: str, types: set[str]) -> str:
    if text.strip().lower() in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    return json.dumps(text, ensure_ascii=False) if is_text(types) else as_json(text)


QWEN3_CODER = TaggedFormat(
    Tags(
        begin="<tool_call>",
        end="</tool_call>",
        before_name="<function=",
        after_name=">",
        call_end="</function>",
        before_key="<parameter=",
        after_key=">",
        value_end="</parameter>",
        other_value_ends=("<parameter=", "</function>"),
        has_lines=True,
    ),
    ToolCallFormat(
        before_name="<tool_call>\n<function=",
        after_name=">\n",
        after_arguments="</function>\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
        arguments=TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    CallOpening("<tool_call>", "<function="),
)

_GLM = Tags(
    begin="<tool_call>",
    end="</tool_call>",
    before_key="<arg_key>",
    after_key="</arg_key>",
    before_value="<arg_value>",
    value_end="</arg_value>",
)
GLM45 = TaggedFormat(
    _GLM,
    ToolCallFormat(
        before_name="<tool_call>",
        after_name="\n",
        after_arguments="</tool_call>",
        separator="\n",
        trigger="<tool_call>",
        arguments=TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
)
"""GLM 4.5 and 4.6 (https://huggingface.co/zai-org/GLM-4.6, chat_template.jinja)."""
GLM47 = TaggedFormat(
    _GLM,
    ToolCallFormat(
        before_name="<tool_call>",
        after_name="",
        after_arguments="</tool_call>",
        trigger="<tool_call>",
        arguments=TaggedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
)
"""GLM 4.7 and later, without line ends."""

MINIMAX_M2 = TaggedFormat(
    Tags(
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        before_name='<invoke name="',
        after_name='">',
        call_end="</invoke>",
        before_key='<parameter name="',
        after_key='">',
        value_end="</parameter>",
    ),
    ToolCallFormat(
        calls_begin="<minimax:tool_call>\n",
        before_name='<invoke name="',
        after_name='">\n',
        after_arguments="</invoke>\n",
        calls_end="</minimax:tool_call>",
        trigger="<minimax:tool_call>",
        arguments=TaggedArguments('<parameter name="', '">', "</parameter>\n"),
    ),
)
"""MiniMax M2 (https://huggingface.co/MiniMaxAI/MiniMax-M2, docs/tool_calling_guide.md)."""
SEED_OSS = TaggedFormat(
    Tags(
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        before_name="<function=",
        after_name=">",
        call_end="</function>",
        before_key="<parameter=",
        after_key=">",
        value_end="</parameter>",
    ),
    ToolCallFormat(
        before_name="<seed:tool_call>\n<function=",
        after_name=">\n",
        after_arguments="</function>\n</seed:tool_call>",
        separator="\n",
        trigger="<seed:tool_call>",
        arguments=TaggedArguments("<parameter=", ">", "</parameter>\n"),
    ),
)
"""Seed-OSS (https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct, chat_template.jinja)."""
