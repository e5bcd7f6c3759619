"""Prints tests/engine/parsing/harmony_messages.json: the messages that openai-harmony parses from the tests' outputs.

`python -m tests.support.harmony_oracle` needs the package openai-harmony, and its vocabulary o200k_base.tiktoken in the
folder TIKTOKEN_ENCODINGS_BASE. Where the library raises an error, the entry is null.
"""

import json
from typing import Any

from tests.engine.parsing.test_harmony import CASES


def messages_of(text: str) -> list[dict[str, Any]] | None:
    """Returns the messages of an output behind `<|start|>assistant`, as the library's streaming parser reads them."""
    from openai_harmony import HarmonyEncodingName, HarmonyError, Role, StreamableParser, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    parser = StreamableParser(encoding, role=Role.ASSISTANT)
    try:
        for token in encoding.encode(text, allowed_special="all"):
            parser.process(token)
        parser.process_eos()
    except HarmonyError:
        return None
    return [
        {
            "role": message.author.role.value,
            "channel": message.channel,
            "recipient": message.recipient,
            "text": "".join(content.text for content in message.content),
        }
        for message in parser.messages
    ]


if __name__ == "__main__":
    print(json.dumps({name: messages_of(text) for name, (text, _) in CASES.items()}, indent=1, ensure_ascii=False))
