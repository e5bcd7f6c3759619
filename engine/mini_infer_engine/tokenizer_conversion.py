"""Adds a `tokenizer.json` to a model folder that stores its tokenizer in another form, in a cached copy of the folder.

Llama's SentencePiece files are read here; transformers' classes read all others (SentencePiece with rules, tiktoken's,
`vocab.json` with `merges.txt`, `vocab.txt`) and write the one form that engine and gateway share. transformers is
imported for such folders alone.
"""

import hashlib
import json
import logging
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.folder import cache_roots, write_folder
from mini_infer_engine.gguf.sentencepiece import llama_tokenizer_files

OTHER_FORMS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
"""Files that tokenizers of other forms have, in the order in which messages name them."""
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_FORM = 2
"""The version of the folder's content; a new number makes new folders."""
_REMEDY = "make a tokenizer.json with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"

log = logging.getLogger(__name__)


def with_tokenizer_json(directory: Path) -> Path:
    """Returns a folder with the same files and a tokenizer.json, or the same folder if it needs none, or has no form
    of a tokenizer at all.

    Raises ModelError if transformers cannot make one.
    """
    source = next((name for name in OTHER_FORMS if (directory / name).is_file()), None)
    if (directory / TOKENIZER).exists() or source is None:
        return directory
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in directory.iterdir())
    identity = repr((_FORM, str(directory.resolve()), files))
    name = f"{directory.resolve().name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    for root in cache_roots("tokenizers"):
        if (root / name / TOKENIZER).is_file():
            return root / name
    made = llama_tokenizer_files(directory / source) if source == OTHER_FORMS[0] else None
    if made is None and (made := _converted(directory, source)) is None:
        return directory
    if (directory / CONFIG).exists():
        made.pop(CONFIG, None)
    links = {file.name: file.resolve() for file in directory.iterdir()}
    for root in cache_roots("tokenizers"):
        try:
            return write_folder(root, name, made, links, TOKENIZER)
        except OSError:
            continue  # a read-only home: the next root
    raise ModelError(f"{directory}: there is no folder to write a tokenizer.json to: set XDG_CACHE_HOME to one.")


def _converted(directory: Path, source: str) -> dict[str, Any] | None:
    """Returns tokenizer.json and tokenizer_config.json as transformers writes them; None if the tokenizer is one of
    Python code, which has no tokenizer.json.

    Raises ModelError, which names `source`, if it cannot.
    """
    if find_spec("transformers") is None:
        raise ModelError(f"{directory / source} needs the package transformers to be read: install it.")
    from transformers import AutoTokenizer

    started = time.monotonic()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file raises, down to errors of Rust and of protobuf
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"{directory / source} cannot be read ({reason}): {_REMEDY}.") from error
    if not tokenizer.is_fast:
        log.warning("%s: %s is Python code, and has no tokenizer.json", directory / source, type(tokenizer).__name__)
        return None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        made = {name: json.loads((Path(folder) / name).read_text("utf-8")) for name in (TOKENIZER, CONFIG)}
    log.info("%s: transformers made a %s of it in %.1f s", directory / source, TOKENIZER, time.monotonic() - started)
    return made
