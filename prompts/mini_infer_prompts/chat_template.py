"""A model's chat template: renders messages to text, as transformers' `apply_chat_template` does.

Names and settings of the Jinja environment are those that templates are written for
(https://huggingface.co/docs/transformers/chat_templating_writing). Knows no tokens.
"""

import copy
from typing import Any

import jinja2

from mini_infer_prompts.call_form import call_form
from mini_infer_prompts.harmony import is_harmony
from mini_infer_prompts.template_budget import (
    PROBE_UNITS,
    TemplateBudgetError,
    UnboundedOperationError,
    one_rendering,
    rendering_units,
)
from mini_infer_prompts.template_environment import is_bounded, template_environment
from mini_infer_web.api_errors import ApiError


class ChatTemplate:
    """One compiled template. It may be shared by threads."""

    def __init__(self, source: str, strict: bool = False) -> None:
        """Compiles the template. Raises ValueError if the source is no template.

        With `strict`, renderings raise TemplateBudgetError and UnboundedOperationError, for a process that renders
        templates of others; a source that is not bounded is not even compiled. Without, as in a server that renders its
        own model's template, they raise ApiError 400.
        """
        self._is_strict = strict
        self._template: jinja2.Template | None = None
        try:
            if not strict or is_bounded(source):
                self._template = template_environment(strict).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # Python's own compiler gives up too.
            raise ValueError(f"chat template: it is too deeply nested ({type(error).__name__})") from error
        # Each rendering copies them, which takes three times as long from the library's chain of maps.
        if self._template:
            self._template.globals = dict(self._template.globals)
        self.is_harmony = is_harmony(source)
        """True if conversations are rendered in harmony, gpt-oss's format."""
        self.knows_developer_role = "'developer'" in source or '"developer"' in source
        self.uses_content_parts = not self._shows("probe") and self._shows([{"type": "text", "text": "probe"}])
        """True if content must come as a list of parts: the template shows no strings (those of some multimodal
        models).
        """
        self.call_form = call_form(source, self._probe)
        self._shown_markers: dict[str, bool] = {}

    def shows_image_parts(self, marker: str) -> bool:
        """True if the template shows a part of the type image by this marker, and the text beside it."""
        if marker not in self._shown_markers:
            shown = self._probe([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "probe"}]}])
            self._shown_markers[marker] = shown is not None and marker in shown and "probe" in shown
        return self._shown_markers[marker]

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Returns the whole conversation as text. `variables` are everything else that the template may read.

        Raises ApiError 400, with the template's words, if it refuses the messages. `continue_final_message` leaves the
        last message open: the text ends where its content ends.
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
        if self._template is None:
            raise UnboundedOperationError("the chat template does things whose cost cannot be predicted")
        context = {"tools": None, "documents": None} | variables
        try:
            with one_rendering():
                return self._template.render(context, messages=messages, add_generation_prompt=add_generation_prompt)
        except (TemplateBudgetError, UnboundedOperationError) as error:
            if self._is_strict:
                raise
            message = f"these messages are more than a rendering of the model's chat template may work on: {error}"
            raise ApiError(400, message, param="messages", code="chat_template_error") from error
        except Exception as error:  # whatever a template does with a client's data ends here: the request is at fault
            message = f"the model's chat template refuses the messages: {error or type(error).__name__}"
            raise ApiError(400, message, param="messages", code="chat_template_error") from error

    def _probe(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            with rendering_units(PROBE_UNITS):
                return self._render(messages, _PROBE_TOKENS, add_generation_prompt=True)
        except (ApiError, TemplateBudgetError, UnboundedOperationError):
            return None

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        message = {"role": "user", "content": content}
        return "probe" in (self._probe([message]) or "")


_PROBE_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Mark behind the last message's content. It ends in a space, so that a template that strips content shows by the
missing space that it does. The words are transformers': content that contains them has the same end there.
"""


def _mark_end(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Returns a copy of the messages with a mark after the last one's content, and that content."""
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
