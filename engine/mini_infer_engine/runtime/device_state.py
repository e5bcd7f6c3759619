"""The device's picture of every slot, and the host's memory of what the device already knows: only differences travel.

It decides nothing about batches; it keeps page tables and sampling parameters true for whoever launches.
"""

import struct
from collections.abc import Iterable

import numpy as np
import torch

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.sampling.sampling_state import SUPPRESSED_WIDTH, SamplingState
from mini_infer_engine.kernels.sampling.state_update import STATE_FIELDS, update_pages, update_slots
from mini_infer_engine.sampling.parameters import DEVICE_FORMAT, DEVICE_PARAMETERS
from mini_infer_engine.sampling.reference import noise_base

_STATE = struct.Struct(f"<4q{DEVICE_FORMAT}q")
"""One slot in the packet of `update_slots` (STATE_FIELDS): slot, length, output index, noise, sampling, min_tokens."""


class DeviceBatchState:
    """One row for each slot and a spare one, which padded rows of a graph use and which never changes."""

    def __init__(self, num_slots: int, table_width: int, null_page: int, device: torch.device) -> None:
        self.padding_slot = num_slots
        self.device = device
        self.state = SamplingState.zeros(num_slots + 1, device)
        # [slots + 1, pages of the longest sequence] int32
        self.page_tables = torch.full((num_slots + 1, table_width), null_page, dtype=torch.int32, device=device)
        self._known_pages = [0] * num_slots
        self._filtered_slots: set[int] = set()

    def begin(self, rows: list[Row]) -> None:
        """Rows whose sample is their slot's first: their sampling parameters and lengths go to the device."""
        if rows:
            packet = np.frombuffer(bytearray(self.pack_updates(rows)), dtype=np.int64)
            update_slots(to_device(packet.reshape(-1, STATE_FIELDS), self.device), self.state)

    def pack_updates(self, rows: list[Row]) -> bytes:
        """What `update_slots` needs of rows that begin: [rows, STATE_FIELDS] int64.

        Tokens that they may not choose are rare, and go to the device at once.
        """
        for row in rows:
            if row.suppressed_token_ids:
                self._suppress(row)
            (self._filtered_slots.add if _is_filtered(row) else self._filtered_slots.discard)(row.slot)
        return b"".join(map(_packed_state, rows))

    def has_filters(self, slots: list[int]) -> bool:
        """Whether, of what runs in one of these slots, some logits may not be chosen."""
        return bool(self._filtered_slots) and not self._filtered_slots.isdisjoint(slots)

    def pack_null_update(self) -> bytes:
        """The same of one line that changes nothing: the spare slot as it is."""
        return _STATE.pack(self.padding_slot, 0, 0, 0, *(form.neutral for _, form in DEVICE_PARAMETERS), 0)

    def compile_updates(self) -> None:
        """Change nothing, so that no request waits for the compiler of `send_pages`' kernel."""
        at = self.padding_slot * self.page_tables.shape[1]
        page = int(self.page_tables[self.padding_slot, 0])
        update_pages(torch.tensor([[at, page]], dtype=torch.int64, device=self.device), self.page_tables)

    def forget_pages(self, rows: list[Row]) -> None:
        """These slots prefill: what the device knows of their page tables is another sequence's."""
        for row in rows:
            self._known_pages[row.slot] = 0

    def send_pages(self, rows: list[Row], page_size: int) -> None:
        """Bring the page tables of decoding rows up to date."""
        known = self._known_pages
        changes: list[int] = []
        for row in rows:
            slot, needed = row.slot, row.start // page_size + 1
            if known[slot] < needed:
                at = slot * self.page_tables.shape[1]
                for index in range(known[slot], needed):
                    changes += (at + index, row.page_table[index])
                known[slot] = needed
        if changes:
            update_pages(to_device(np.array(changes, dtype=np.int64).reshape(-1, 2), self.device), self.page_tables)

    def _suppress(self, row: Row) -> None:
        token_ids = list(row.suppressed_token_ids)
        assert len(token_ids) <= SUPPRESSED_WIDTH, "refuses_suppressed was not asked"
        padded = np.full(SUPPRESSED_WIDTH, -1, dtype=np.int32)
        padded[: len(token_ids)] = token_ids
        self.state.suppressed[row.slot].copy_(to_device(padded, self.device))


def refuses_suppressed(asks: SamplingParams, eos_token_ids: Iterable[int]) -> str | None:
    """Why these parameters hold back more tokens than a slot has room for on the device; None: they do not."""
    held_back = {*asks.stop_token_ids, *(() if asks.ignore_eos else eos_token_ids)}
    if not asks.min_tokens or len(held_back) <= SUPPRESSED_WIDTH:
        return None
    return (
        f"min_tokens = {asks.min_tokens} with {len(held_back)} stop tokens (stop_token_ids and the model's own): "
        f"at most {SUPPRESSED_WIDTH} can be held back on this engine; send fewer stop_token_ids, or no min_tokens."
    )


def _is_filtered(row: Row) -> bool:
    asks = row.sampling
    assert asks is not None
    return bool(row.suppressed_token_ids) or asks.top_k > 0 or asks.top_p < 1 or asks.min_p > 0


def _packed_state(row: Row) -> bytes:
    asks = row.sampling
    assert asks is not None
    return _STATE.pack(
        row.slot,
        row.start + row.count - 1,  # sampling adds one to the length
        row.output_index,
        noise_base(row.noise_seed),
        *[form.value(getattr(asks, name)) for name, form in DEVICE_PARAMETERS],
        asks.min_tokens if row.suppressed_token_ids else 0,  # else the slot's last sequence's would be suppressed
    )


def page_table_width(max_model_len: int, page_size: int) -> int:
    """Pages of the longest sequence."""
    return -(-max_model_len // page_size)
