"""The device's picture of every slot, and the host's memory of what the device already knows: only differences travel.

It decides nothing about batches; it keeps page tables and sampling parameters true for whoever launches.
"""

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.batch import Row
from mini_infer_engine.inputs import to_device
from mini_infer_engine.kernels.sample import SUPPRESSED_WIDTH, SamplingState
from mini_infer_engine.kernels.slot_update import STATE_FIELDS, update_pages, update_slots
from mini_infer_engine.models.errors import ModelError
from mini_infer_engine.sampler import GREEDY_TEMPERATURE, noise_base


class SlotTable:
    """One row for each slot and a spare one, which padded rows of a graph use and which never changes."""

    def __init__(self, num_slots: int, table_width: int, spare_page: int, device: torch.device) -> None:
        self.spare_slot = num_slots
        self.device = device
        self.state = SamplingState.zeros(num_slots + 1, device)
        # [slots + 1, pages of the longest sequence] int32
        self.page_tables = torch.full((num_slots + 1, table_width), spare_page, dtype=torch.int32, device=device)
        self._known_pages = [0] * num_slots

    def begin(self, rows: list[Row]) -> None:
        """Rows whose sample is their slot's first: their sampling parameters and lengths go to the device."""
        if rows:
            packet = np.empty((len(rows), STATE_FIELDS), dtype=np.int64)
            self.describe(rows, packet)
            update_slots(to_device(packet, self.device), self.state)

    def describe(self, rows: list[Row], packet: np.ndarray) -> None:
        """What `update_slots` needs of rows that begin, into [rows or more, STATE_FIELDS] int64.

        The lines behind theirs become the spare slot's.
        """
        floats = packet.view(np.float64)
        packet[len(rows) :] = 0
        packet[len(rows) :, 0] = self.spare_slot
        floats[len(rows) :, 6] = 1.0
        for index, row in enumerate(rows):
            asks = row.sampling
            assert asks is not None
            greedy = asks.temperature < GREEDY_TEMPERATURE
            # Sampling adds one to the length: before it, the position of the row's last token.
            packet[index, :4] = (row.slot, row.start + row.count - 1, row.output_index, noise_base(row.noise_seed))
            packet[index, 5] = max(0, asks.top_k)
            packet[index, 8] = asks.min_tokens if row.suppressed_token_ids else 0
            floats[index, 4] = 0.0 if greedy else 1.0 / asks.temperature
            floats[index, 6:8] = asks.top_p, asks.min_p
            if row.suppressed_token_ids:
                self._suppress(row)

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
        if len(token_ids) > SUPPRESSED_WIDTH:
            raise ModelError(
                f"{len(token_ids)} stop token ids with min_tokens: at most {SUPPRESSED_WIDTH} can be held back; "
                "ask for fewer stop_token_ids or for min_tokens = 0."
            )
        padded = np.full(SUPPRESSED_WIDTH, -1, dtype=np.int32)
        padded[: len(token_ids)] = token_ids
        self.state.suppressed[row.slot].copy_(to_device(padded, self.device))


def page_table_width(max_model_len: int, page_size: int) -> int:
    """Pages of the longest sequence."""
    return -(-max_model_len // page_size)


def slot_tensor(slots: list[int], length: int, spare_slot: int) -> Tensor:
    """Slots as int32 in pinned memory, padded to `length`."""
    tensor = torch.full((length,), spare_slot, dtype=torch.int32, pin_memory=True)
    tensor[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return tensor
