"""Creates the text side of the model of `--dry-run`: a vocabulary of the 256 bytes and a small chat
template. No files.
"""

import json

from mini_infer_prompts.prompt import PromptAssets

TURN_START_ID, TURN_END_ID, END_ID = 256, 257, 258
EOS_TOKEN_IDS = (TURN_END_ID, END_ID)
VOCAB_SIZE = 259
"""Size of the vocabulary. Token id n below 256 is the byte n."""
MAX_MODEL_LEN = 32_768

_SPECIAL_TOKENS = {TURN_START_ID: "<|im_start|>", TURN_END_ID: "<|im_end|>", END_ID: "<|endoftext|>"}
_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n"
    'Call one so: <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{% if not (continue_final_message and loop.last) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template that shows and calls tools in the format of Hermes models, which scripts rely on."""


def dry_assets() -> PromptAssets:
    """Returns the files that a model folder would have for this model."""
    files = {
        "tokenizer.json": json.dumps(_tokenizer()),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "chat_template": _CHAT_TEMPLATE}),
    }
    return PromptAssets.from_files(files)


def _tokenizer() -> dict[str, object]:
    """Returns tokenizer.json of a byte-level BPE without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, content in _SPECIAL_TOKENS.items()
    ]
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _byte_characters() -> list[str]:
    """Returns the printable character of each byte in byte-level vocabularies (Radford et al., GPT-2, 2019).

    A byte stands for itself if Latin-1 prints it. The others are mapped to the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
