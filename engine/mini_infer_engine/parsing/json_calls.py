"""Parses a tool call that is a JSON object, {"name": ..., "arguments": ...}, as it comes. Knows no
markers around it.
"""

from collections.abc import Container

from mini_infer_engine.parsing.json_reader import Recorder, read_decoded_string, read_value
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
"""Keys of arguments: models write either, whatever their template shows."""
_WRAPPER = "function"
"""Key of an object within which models that have seen much of OpenAI's API write the call."""
_OTHERS = ("type", "id")
"""Other keys that calls may have where no marker says that an object is one; any other key says that it is none."""


def read_call(source: TextSource, sink: Sink, names: Container[str] | None = None) -> Waiting[str | None]:
    """Emits the call that the next object is; reads to the object's end, or to where it is no JSON any more.

    Returns the text that was read if that is no call, and None if it is one. `names`: only an object that names one of
    these and has arguments is a call, which distinguishes it from other JSON where no marker does; if None, any object
    that has a name is one.
    """
    source.mark()
    is_call = yield from _Object(source, sink, names).read()
    read = source.release()
    return None if is_call else read


def read_calls(source: TextSource, sink: Sink, lead: str) -> Waiting[None]:
    """Parses a list of calls, or one alone. `lead` was read before; it is text if no call follows."""
    if (yield from source.accept("[")):
        lead += "["
    while True:
        lead += yield from source.skip_space()
        text = yield from read_call(source, sink)
        if text is not None:
            sink.content(lead + text)
            return
        lead = yield from source.skip_space()
        if not (yield from source.accept(",")):
            yield from source.accept("]")
            return
        lead += ","


class _Object:
    """Parses one object. Nothing is emitted until it is known to be a call; from then on, its arguments are, as they
    come.
    """

    def __init__(self, source: TextSource, sink: Sink, names: Container[str] | None) -> None:
        self._source = source
        self._sink = sink
        self._names = names
        self._name = ""
        self._early: Recorder | None = None
        """Arguments that came before the name."""
        self._has_begun = False

    def read(self) -> Waiting[bool]:
        if not (yield from self._source.accept("{")):
            return False
        while True:
            yield from self._source.skip_space()
            character = yield from self._source.peek()
            if character == ",":
                self._source.take(1)
            elif character == "}":
                self._source.take(1)
                if self._name and self._names is None:
                    self._begin(arguments="{}")
                return self._has_begun
            elif character != '"' or not (yield from self._read_member()):
                return self._has_begun

    def _read_member(self) -> Waiting[bool]:
        """Reads one key and its value. Returns False if the object cannot go on."""
        key = Recorder()
        if not (yield from read_decoded_string(self._source, key)):
            return False
        yield from self._source.skip_space()
        if not (yield from self._source.accept(":")):
            return False
        yield from self._source.skip_space()
        if key.text == _NAME and not self._name:
            return (yield from self._read_name())
        if key.text in _ARGUMENTS and self._early is None and not self._has_begun:
            return (yield from self._read_arguments())
        if key.text == _WRAPPER and not self._has_begun and (yield from self._source.peek()) == "{":
            return (yield from self.read())
        if self._names is not None and not self._has_begun and key.text not in _OTHERS:
            return False
        return (yield from read_value(self._source, Recorder()))

    def _read_name(self) -> Waiting[bool]:
        name = Recorder()
        if (yield from self._source.peek()) != '"' or not (yield from read_decoded_string(self._source, name)):
            return False
        if not name.text or (self._names is not None and name.text not in self._names):
            return False
        self._name = name.text
        if self._early is not None:
            self._begin(self._early.text)
        return True

    def _read_arguments(self) -> Waiting[bool]:
        if self._name:
            self._begin()
            emit = self._sink.arguments
        else:
            emit = self._early = Recorder()
        if (yield from self._source.accept("null")):
            emit("{}")
            return True
        if (yield from self._source.peek()) == '"':  # JSON within a string
            return (yield from read_decoded_string(self._source, emit))
        return (yield from read_value(self._source, emit))

    def _begin(self, arguments: str = "") -> None:
        if not self._has_begun:
            self._has_begun = True
            self._source.release()
            self._sink.begin_call(self._name)
            self._sink.arguments(arguments)
