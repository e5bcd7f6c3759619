"""Implements the runner of `--dry-run`: a pretended model that repeats the user's message, or replies by a script.

It needs neither torch nor weights. Its KV cache is real: a page holds the token ids that were computed into it, and the
reply is read from there alone. A wrong page table, a wrong cache hit or a page reused too early therefore changes the
text.
"""

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_infer_engine.config.model.kv_groups import UNIFORM
from mini_infer_engine.core.batch import NO_SWAP, Batch, PageCopy, Row, TokenMasks
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.dry.script import Script, reply_for
from mini_infer_engine.dry.vocabulary import END_ID, TURN_END_ID, TURN_START_ID
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory
from mini_infer_engine.kv_transfer.transports.shared_memory import SharedArray

PAGE_SIZE_TOKENS = 16
EMBEDDING_SIZE = 16
PRETENDED_BYTES_PER_TOKEN = 16_384
"""Pretended bytes of a token's keys and values, about those of a model of 0.5 B parameters, so that `--kv-cache-memory`
has an effect.
"""

_USER_TURN = [TURN_START_ID, *b"user\n"]
_GREETING = list(b"You said: ")
_SPACE = 0x20
_NUM_BYTES = 256
_ENDS_SOON = (TURN_END_ID, END_ID, *b'"}]0', *range(ord("!"), ord("~")))
"""Tokens that end a text under a grammar soonest: end tokens, then those that close strings, objects and arrays, then
any printable character except blanks.
"""


@dataclass(slots=True)
class _Launched:
    rows: list[Row]
    result: PassResult
    ready_at: float = 0.0


class ScriptedRunner:
    """Answers a chat with its last user message, a plain prompt with itself, and then ends."""

    def __init__(
        self,
        num_pages: int,
        step_s: float = 0.0,
        page_size: int = PAGE_SIZE_TOKENS,
        script: Script = (),
        *,
        is_shared: bool = False,
    ) -> None:
        """Allocates the pages. `is_shared` lets other processes map them."""
        self.swap_space = NO_SWAP
        self.eviction_obstacle: str | None = "a dry run has no cache from which tokens could be evicted"
        self.host_memory = None
        self.kv_cache = UNIFORM
        self.max_speculative_rows = 0
        self.page_size = page_size
        self.num_pages = num_pages
        self._script = script
        self._step_s = step_s
        """Seconds that a pass pretends to take."""
        # As much memory as a token needs to be known.
        shared = SharedArray(num_pages * page_size * 4) if is_shared else None
        self._file = None if shared is None else shared.file
        raw = np.empty(num_pages * page_size, np.int32) if shared is None else shared.bytes.view(np.int32)
        self._pages = raw.reshape(num_pages, page_size)
        self._pages[:] = END_ID
        self._replies: dict[int, list[int]] = {}
        """Replies of running sequences, by slot."""
        self._last_sampled: dict[int, int] = {}
        self._busy_until = 0.0

    def refuses(self, request: Request) -> str | None:
        """Returns the reason why a request cannot be served, or None: the pretended model has no probabilities."""
        sampling = request.sampling
        if request.beam_search is not None:
            return "use_beam_search asks for probabilities, and the dry run's pretended model has none: serve a model."
        for name in ("logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words_token_ids"):
            if getattr(sampling, name) not in (None, {}, []):
                return f"{name} asks for probabilities, and the dry run's pretended model has none: serve a real model."
        if sampling.min_tokens and len(set(sampling.stop_token_ids)) >= _NUM_BYTES:
            return (
                f"min_tokens = {sampling.min_tokens} with {len(sampling.stop_token_ids)} stop_token_ids: none is left."
            )
        return None

    def launch(self, batch: Batch) -> _Launched:
        """Computes the pass at once. Its result is ready when the pretended device has finished its earlier passes."""
        for copy in batch.transfers.copies:
            self._copy(copy)
        for row in batch.rows:
            self._write(row)
        self._busy_until = max(time.monotonic(), self._busy_until) + self._step_s
        launched = _Launched(batch.rows, PassResult([]), self._busy_until)
        if not batch.waits_for_masks:
            self.sample(launched, None)
        return launched

    def guesses(self, handle: Any) -> Mapping[int, Sequence[int]]:
        """Returns no guesses."""
        del handle
        return {}

    def sample(self, handle: _Launched, masks: TokenMasks | None) -> None:
        """Samples the next token of each row. Without `masks` every token is allowed."""
        by_row = {} if masks is None else dict(zip(masks.rows, masks.bits, strict=True))
        sampled = [self._sample(row, by_row.get(index)) for index, row in enumerate(handle.rows)]
        handle.result = PassResult([() if token is None else (token,) for token in sampled])
        handle.result.embeddings = {
            index: embedding_of(self._read(row.page_table, row.start + row.count))
            for index, row in enumerate(handle.rows)
            if row.embeds
        }

    def collect(self, handle: _Launched) -> PassResult:
        """Waits as long as a device would, and returns the result."""
        time.sleep(max(0.0, handle.ready_at - time.monotonic()))
        return handle.result

    def kv_memory(self) -> KVMemory:
        """Returns the pages for KV transfer: one layer, which has the id of each token."""
        layout = KVLayout(num_layers=1, halves=1, page_size=self.page_size, num_heads=1, head_bytes=4, dtype="token id")
        address = self._pages.ctypes.data
        return KVMemory(
            address=address, num_pages=self.num_pages, device="cpu", device_index=0, layout=layout, file=self._file
        )

    def _copy(self, copy: PageCopy) -> None:
        self._pages[copy.target, : copy.tokens] = self._pages[copy.source, : copy.tokens]

    def _write(self, row: Row) -> None:
        token_ids = [self._last_sampled[row.slot]] if row.token_ids is None else row.token_ids
        position, end = row.start, row.start + row.count
        while position < end:
            page_index, offset = divmod(position, self.page_size)
            count = min(self.page_size - offset, end - position)
            first = position - row.start
            self._pages[row.page_table[page_index], offset : offset + count] = token_ids[first : first + count]
            position += count

    def _read(self, page_table: Sequence[int], count: int) -> list[int]:
        pages = list(page_table[: -(-count // self.page_size)])
        tokens: list[int] = self._pages[pages].reshape(-1)[:count].tolist()
        return tokens

    def _sample(self, row: Row, mask: np.ndarray | None) -> int | None:
        if row.sampling is None:
            return None
        if row.token_ids is not None or row.slot not in self._replies:
            prompt_length = row.start + row.count - row.output_index
            self._replies[row.slot] = reply_to(self._read(row.page_table, prompt_length), self._script)
        reply = self._replies[row.slot]
        token_id = reply[row.output_index % len(reply)]
        if token_id in row.suppressed_token_ids:
            others = (_SPACE, *range(_NUM_BYTES))
            token_id = next(other for other in others if other not in row.suppressed_token_ids)
        if mask is not None:
            token_id = _allowed(token_id, mask)
        self._last_sampled[row.slot] = token_id
        return token_id


def _allowed(preferred: int, mask: np.ndarray) -> int:
    """Returns the intended token if the grammar allows it, or else the allowed one that ends the text soonest."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    if preferred in allowed:
        return preferred
    return next((token for token in _ENDS_SOON if token in allowed), int(allowed[0]))


def embedding_of(token_ids: list[int]) -> bytes:
    """Returns a pretended hidden state of norm 1, as packed fp32: counts of the prompt's tokens by remainder."""
    counts = [0] * EMBEDDING_SIZE
    for token_id in token_ids:
        counts[token_id % EMBEDDING_SIZE] += 1
    return array("f", [count / math.hypot(*counts) for count in counts]).tobytes()


def reply_to(prompt_token_ids: list[int], script: Script = ()) -> list[int]:
    """Returns the tokens of the reply with an end token: the script's, the last user message or the prompt itself."""
    reply = reply_for(_text(prompt_token_ids), script) if script else None
    if reply is not None:
        return [*reply.encode(), TURN_END_ID]
    for start in range(len(prompt_token_ids) - len(_USER_TURN), -1, -1):
        if prompt_token_ids[start : start + len(_USER_TURN)] == _USER_TURN:
            message = prompt_token_ids[start + len(_USER_TURN) :]
            end = message.index(TURN_END_ID) if TURN_END_ID in message else len(message)
            return [*_GREETING, *message[:end], TURN_END_ID]
    return [*prompt_token_ids, END_ID]


def _text(token_ids: list[int]) -> str:
    return bytes(token_id for token_id in token_ids if token_id < _NUM_BYTES).decode(errors="replace")
