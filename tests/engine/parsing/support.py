"""Reads texts whole and in pieces, for tests of every format."""

import random
from dataclasses import dataclass

from mini_infer_engine.parsing.base import OutputParsing, ParsedOutput, Tool
from mini_infer_engine.parsing.parser import FormatParser
from mini_infer_engine.parsing.registry import OutputFormats

TOOLS = (Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}), Tool("add"))


@dataclass(frozen=True)
class Read:
    """What was found, without ids."""

    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""


def read_pieces(
    pieces: list[str], formats: OutputFormats, tools: tuple[Tool, ...] = TOOLS, prompt_end: str = ""
) -> Read:
    parser = FormatParser(formats, OutputParsing(tools=tools), prompt_end)
    parsed = ParsedOutput()
    for piece in pieces:
        parsed.add(parser.push(piece))
    parsed.add(parser.finish())
    return Read(parsed.content, tuple((call.name, call.arguments) for call in parsed.tool_calls), parsed.reasoning)


def cuts(text: str, seed: int, count: int = 12) -> list[list[str]]:
    """The text character by character, in halves at every place, and in `count` random ways."""
    chosen = random.Random(seed)
    divisions = [list(text)] + [[text[:at], text[at:]] for at in range(1, len(text))]
    for _ in range(count):
        places = sorted(chosen.sample(range(len(text) + 1), chosen.randint(0, len(text))))
        divisions.append([text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)])
    return divisions
