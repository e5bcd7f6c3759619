"""Builds grammars of tool calls: what a model's format writes around names and arguments, and the tools' schemas."""

from collections.abc import Mapping

from mini_infer_engine.parsing.base import OutputParsing, Tool
from mini_infer_engine.parsing.tool_format import ToolCallFormat
from mini_infer_engine.structured.grammar import TEXT, Grammar, literal, of_lark
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.tool_arguments import Arguments, shared_rules


def restricts(parsing: OutputParsing) -> bool:
    """Returns True if calls are constrained: if one is made, of which tools, with which arguments, or how many."""
    is_strict = any(tool.strict for tool in parsing.tools)
    is_forced = parsing.tool_choice != "auto"
    return is_forced or is_strict or parsing.has_forbidden_tools or not parsing.parallel_tool_calls


def calls_or_answer(parsing: OutputParsing, form: ToolCallFormat, answer: GrammarRequest | None) -> GrammarRequest:
    """Returns the grammar request of an output under the choice of tools; `answer` applies where no tool is called."""
    is_forced = parsing.tool_choice != "auto"
    param = "tool_choice" if is_forced else "tools" if answer is None else answer.param

    def build(special_tokens: Mapping[str, int]) -> Grammar:
        if is_forced:
            return only_calls(parsing, form, special_tokens)
        calls = _Calls(form, parsing, special_tokens)
        return calls.in_free_text() if answer is None else calls.or_else(answer.build(special_tokens))

    return GrammarRequest(param, build)


def only_calls(parsing: OutputParsing, form: ToolCallFormat, special_tokens: Mapping[str, int]) -> Grammar:
    """Returns the grammar of nothing but calls."""
    return _Calls(form, parsing, special_tokens).alone()


_NUMBER = "/[0-9]{1,6}/"


class _Calls:
    """Rules of Lark for the calls of one request."""

    def __init__(self, form: ToolCallFormat, parsing: OutputParsing, special_tokens: Mapping[str, int]) -> None:
        self._form = form
        self._tools = parsing.tools
        self._special_tokens = special_tokens
        self._is_one = not parsing.parallel_tool_calls or parsing.tool_choice == "named"
        self._is_free = parsing.tool_choice == "auto"
        self._inner: dict[str, Grammar] = {}
        self._parts: list[str] = []
        """Rules of parts of the arguments."""
        rules = [f"arguments{index}: {self._arguments(tool)}" for index, tool in enumerate(parsing.tools)]
        rules.append("call: " + " | ".join(f"{self._name(index)} {self._ending(index)}" for index in self._indices))
        rules.append(shared_rules(form.arguments, special_tokens) + f"TEXT: {TEXT}")
        self._rules = "\n".join(self._parts + rules)

    @property
    def _indices(self) -> range:
        return range(len(self._tools))

    def _arguments(self, tool: Tool) -> str:
        """Matches arguments. If a tool is not strict, its schema is enforced only where a call is forced."""
        checks_schema = tool.strict or not self._is_free
        arguments = Arguments(tool, self._refer, self._special_tokens, self._parts, checks_schema=checks_schema)
        return arguments.expression(self._form.arguments) or '""'

    def _refer(self, grammar: Grammar) -> str:
        keyword = f"inner{len(self._inner)}_"
        self._inner[keyword] = grammar
        return f"@{keyword}"

    def _literal(self, text: str) -> str:
        return literal(text, self._special_tokens)

    def _name(self, index: int) -> str:
        name, after = self._tools[index].name, self._form.after_name
        if not self._form.has_number:
            return self._literal(name + after)
        return f"{self._literal(name + ':')} {_NUMBER} {self._literal(after)}"

    def _ending(self, index: int) -> str:
        """Matches the end of a call, from its arguments on."""
        return f"arguments{index} {self._literal(self._form.after_arguments)}"

    def alone(self) -> Grammar:
        """Returns a grammar of nothing but calls."""
        return self._grammar(f"start: {self._calls}")

    def or_else(self, answer: Grammar) -> Grammar:
        """Returns a grammar of nothing but calls, or of the answer."""
        return self._grammar(f"start: {self._refer(answer)} | {self._calls}")

    def in_free_text(self) -> Grammar:
        """Returns a grammar of any text, in which calls begin at the format's trigger."""
        form = self._form
        if form.trigger:
            rest = (form.calls_begin + form.before_name).removeprefix(form.trigger)
            begins = {form.trigger: f"{self._literal(rest)} call"}
        else:
            before = form.calls_begin + form.before_name
            begins = {
                before + tool.name + form.after_name: self._ending(index) for index, tool in enumerate(self._tools)
            }
        rules = [self._free(index, trigger) for index, trigger in enumerate(begins)]
        found = " | ".join(f"free{index} {rest} {self._more}" for index, rest in enumerate(begins.values()))
        rules.append(f"found: {found}")
        if self._is_special(form.trigger):
            rules.append(f"PLAIN: TEXT & ~(TEXT {literal(form.trigger)} TEXT)")
        start = f"found | {self._text}" if self._is_one else f"found* {self._text}"
        return self._grammar("\n".join([f"start: {start}", *rules]))

    def _free(self, index: int, trigger: str) -> str:
        """Matches text up to a trigger. A special token is no text, so that nothing else can match it."""
        attributes = "" if self._is_special(trigger) else "[lazy]"
        return f"free{index}{attributes}: {self._text} {self._literal(trigger)}"

    def _is_special(self, trigger: str) -> bool:
        return any(token in trigger for token in self._special_tokens)

    @property
    def _text(self) -> str:
        """The rule of free text. It excludes a trigger that is a special token, even spelled out in letters."""
        return "PLAIN" if self._is_special(self._form.trigger) else "TEXT"

    @property
    def _calls(self) -> str:
        return f"{self._literal(self._form.calls_begin + self._form.before_name)} call {self._more}"

    @property
    def _more(self) -> str:
        """Matches what follows the first call."""
        form = self._form
        more = "" if self._is_one else f"({self._literal(form.separator + form.before_name)} call)* "
        return more + self._literal(form.calls_end)

    def _grammar(self, rules: str) -> Grammar:
        return of_lark(f"{rules}\n{self._rules}", **self._inner)
