"""Hidden states are where their tokens' keys and values are, also after copies and swaps."""

import torch

from mini_infer_engine.core.batch import PageCopy, PageSwap, Row, Transfers
from mini_infer_engine.runtime.hidden_states import entry_rows
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages, decode_index

CPU, PAGE_SIZE = torch.device("cpu"), 16


def make_pages(num_host_pages: int = 0) -> HiddenPages:
    return HiddenPages(5, PAGE_SIZE, 8, torch.float32, CPU, num_host_pages)


def test_states_are_stored_at_the_decoded_tokens_place() -> None:
    pages, table = make_pages(), torch.tensor([[3, 1], [0, 4], [5, 5]], dtype=torch.int32)
    lengths = torch.tensor([PAGE_SIZE + 2, 7, -1])
    index = decode_index(table, torch.tensor([1, 0, 2], dtype=torch.int32), lengths, PAGE_SIZE)
    assert index.tolist() == [4 * PAGE_SIZE + 2, 3 * PAGE_SIZE + 7, -1]
    states = torch.arange(1.0, 25.0).view(3, 8)
    pages.write(index, states)
    assert torch.equal(pages.read(index[:2]), states[:2])
    assert torch.equal(pages.pages[4, 2], states[0])
    assert int((pages.pages[:5].sum(dim=-1) != 0).sum()) == 2, "the third one is nowhere"


def test_states_follow_their_pages_when_those_are_copied_or_swapped() -> None:
    pages = make_pages(num_host_pages=2)
    pages.pages[1] = torch.arange(1.0, 1 + PAGE_SIZE * 8).view(PAGE_SIZE, 8)
    before = pages.pages[1].clone()
    pages.copy([PageCopy(1, 3, 5)])
    assert torch.equal(pages.pages[3, :5], before[:5])
    assert not pages.pages[3, 5:].any()
    pages.swap(Transfers(swap_out=[PageSwap(1, 0)]))
    pages.pages[1].zero_()
    pages.swap(Transfers(swap_in=[PageSwap(4, 0)]))
    assert torch.equal(pages.pages[4], before)


def test_entries_have_one_place_less_and_the_first_token_none() -> None:
    tokens = list(range(20, 26))
    whole, later, single = entry_rows(
        [
            Row(0, 0, 6, tokens, [0], None),
            Row(1, 3, 3, tokens[3:], [1], None),
            Row(2, 0, 1, [9], [2], None),
            Row(3, 1, 1, [8], [3], None),
        ]
    )
    assert (whole.start, whole.count, whole.position, list(whole.token_ids or ())) == (0, 5, 1, tokens[1:])
    assert (later.start, later.count, later.position, list(later.token_ids or ())) == (2, 3, 3, tokens[3:])
    assert (single.slot, single.start, single.position) == (3, 0, 1)
