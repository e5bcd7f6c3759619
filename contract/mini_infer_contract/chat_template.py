"""A model's chat template: messages to text, as transformers' `apply_chat_template` renders them.

Names and settings of the Jinja environment are those that templates are written for
(https://huggingface.co/docs/transformers/chat_templating_writing). Knows no tokens.
"""

import copy
import datetime
import json
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.call_form import call_form


class ChatTemplate:
    """One compiled template. It may be shared by threads."""

    def __init__(self, source: str) -> None:
        """ValueError: the source is no template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        # Each rendering copies them, which takes three times as long from the library's chain of maps.
        self._template.globals = dict(self._template.globals)
        self.knows_developer_role = "'developer'" in source or '"developer"' in source
        self.wants_content_parts = not self._shows("probe") and self._shows([{"type": "text", "text": "probe"}])
        """Content must come as a list of parts: the template shows no strings (those of some multimodal models)."""
        self.call_form = call_form(source, self._probe)

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The whole conversation as text. `variables`: everything else that the template may read.

        ApiError 400, with the template's words, where it refuses the messages. `continue_final_message` leaves the last
        message open: the text ends where its content ends.
        """
        if continue_final_message and add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt exclude each other: "
                "set add_generation_prompt to false to continue the last message",
                param="continue_final_message",
            )
        if not continue_final_message:
            return self._render(messages, variables, add_generation_prompt)
        marked, content = _mark_end(messages)
        text = self._render(marked, variables, add_generation_prompt=False)
        end = text.rfind(_END_MARK.strip())
        if end < 0 or content.strip() not in text:
            raise ApiError(
                400,
                "continue_final_message: this model's chat template does not show the last message's content as it is",
                param="continue_final_message",
            )
        # A template that strips content has stripped the mark's space too: then the text before it ends stripped.
        return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any], add_generation_prompt: bool) -> str:
        context = {"tools": None, "documents": None} | variables
        try:
            return self._template.render(context, messages=messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # whatever a template does with a client's data ends here: the request is at fault
            message = f"the model's chat template refuses the messages: {error or type(error).__name__}"
            raise ApiError(400, message, param="messages", code="chat_template_error") from error

    def _probe(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self._render(messages, _PROBE_TOKENS, add_generation_prompt=True)
        except ApiError:
            return None

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        message = {"role": "user", "content": content}
        return "probe" in (self._probe([message]) or "")


_PROBE_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Ends in a space so that a template that strips content shows by the missing space that it does. The same words as
transformers': content that holds them has the same end there."""


def _mark_end(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """A copy of the messages with a mark after the last one's content, and that content."""
    messages = [*messages[:-1], copy.deepcopy(messages[-1])]
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _END_MARK
        return messages, content
    for part in reversed(content or []):
        if "text" in part:
            text = part["text"]
            part["text"] = text + _END_MARK
            return messages, text
    raise ApiError(
        400, "continue_final_message: the last message has no text to continue", param="continue_final_message"
    )


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: marks an assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A call block, so that its body has a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


_DICT_ATTRIBUTES = frozenset(dir(dict))


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """`message.role` looks for an attribute first and for a key when that has failed; of a dict's it is known."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See jinja2: the same result, in a quarter of the time for the fields of messages."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
