"""From an OpenAI request to token ids, exactly as the engine's model expects them, on every side that needs them.

An engine serves its tokenizer files under a content hash (`PromptAssets`); engine and gateway build the same
`PromptEncoder` from them. This file knows no HTTP, no sampling and no cache but its own.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Self

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mini_infer_contract.api_errors import ApiError

FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class PromptAssets(msgspec.Struct, frozen=True, kw_only=True):
    """The text files that turn a conversation into token ids, and the hash that names them."""

    revision: str
    """sha256 over names and texts, hex."""
    files: dict[str, str]
    """File name to text; "tokenizer.json" is always there."""

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Reads a model folder in Hugging Face format."""
        folder = Path(path)
        files = {name: (folder / name).read_text("utf-8") for name in FILE_NAMES if (folder / name).is_file()}
        if "tokenizer.json" not in files:
            raise FileNotFoundError(f"{folder} has no tokenizer.json: save the tokenizer there with save_pretrained()")
        digest = hashlib.sha256(msgspec.msgpack.encode(sorted(files.items())))
        return cls(revision=digest.hexdigest(), files=files)


class PromptEncoder:
    """Renders, encodes and decodes for one model. Not thread-safe: keep one a thread."""

    def __init__(self, assets: PromptAssets) -> None:
        self.revision = assets.revision
        self.tokenizer: Tokenizer = Tokenizer.from_str(assets.files["tokenizer.json"])
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        config = json.loads(assets.files.get("tokenizer_config.json", "{}"))
        tokens = json.loads(assets.files.get("special_tokens_map.json", "{}")) | config
        self.special_tokens: dict[str, str] = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in tokens.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        template = assets.files.get("chat_template.jinja") or config.get("chat_template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(template) if isinstance(template, str) else None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The whole conversation as text."""
        if self._template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        if continue_final_message:
            raise ApiError(400, "continue_final_message is not supported", param="continue_final_message")
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **(template_kwargs or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, special tokens in it included."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a rendered conversation."""
        text = self.render(messages, tools, add_generation_prompt, continue_final_message, template_kwargs)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def chat_prompt_ids(encoder: PromptEncoder, body: dict[str, Any]) -> list[int]:
    """Token ids of a /v1/chat/completions body."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    return encoder.encode_chat(
        messages,
        body.get("tools"),
        body.get("add_generation_prompt", True),
        body.get("continue_final_message", False),
        body.get("chat_template_kwargs"),
    )


def completion_prompt_ids(encoder: PromptEncoder | None, body: dict[str, Any]) -> list[list[int]]:
    """Token ids of each prompt of a /v1/completions body; `encoder` None: only token ids are understood."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, "prompt must be a string, a list of token ids, or a list of these", param="prompt")
    prompts = []
    for item in prompt:
        if isinstance(item, str):
            if encoder is None:
                raise ApiError(400, "this server has no tokenizer: send token ids", param="prompt")
            prompts.append(encoder.encode(item, body.get("add_special_tokens", True)))
        else:
            prompts.append(item)
    return prompts
