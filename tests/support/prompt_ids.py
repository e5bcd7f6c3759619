"""Token ids of prompts in one go, as tests compare them with those that servers make in slices."""

from typing import Any

from mini_infer_prompts.prompt import PromptEncoder, PromptText, completion_prompts, prompt_path
from mini_infer_web.api_errors import refuse_field


def encode_chat(encoder: PromptEncoder, messages: list[dict[str, Any]], *args: Any, **options: Any) -> list[int]:
    """Returns the token ids of the rendered conversation; the options are those of `PromptEncoder.render`."""
    return encoder.encode(encoder.render(messages, *args, **options), add_special_tokens=False)


def completion_prompt_ids(encoder: PromptEncoder | None, body: dict[str, Any]) -> list[list[int]]:
    """Returns the token ids of each prompt of a /v1/completions body; see `completion_prompts`."""
    prompts = []
    for index, prompt in enumerate(completion_prompts(body)):
        where = prompt_path(body, index)
        if isinstance(prompt, PromptText):
            if encoder is None:
                refuse_field(where, "is text, but this server has no tokenizer: send token ids")
            prompt = encoder.encode(prompt.text, prompt.add_special_tokens)
        if not prompt:
            refuse_field(where, "is empty: send at least one token")
        prompts.append(prompt)
    return prompts
