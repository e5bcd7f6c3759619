"""Pages and states that come back to a preempted sequence are proved: those with other bytes are named, no others."""

from dataclasses import replace

import torch

from mini_infer_engine.core.batch import PageSwap, StateSwap, Transfers
from mini_infer_engine.models.state_spec import StateSpec
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from tests.engine.runtime.test_kv_pool_and_attention import CPU, SPEC

STATE_SPEC = StateSpec(num_layers=2, channels=6, width=3, state_shape=(2, 4, 4), dtype=torch.float32)


def make_pool() -> tuple[KVPool, StatePool]:
    """A pool of four pages and two states with random bytes, and as many in main memory."""
    pool = KVPool(SPEC, 4, CPU, num_host_pages=4)
    pool.states = StatePool(STATE_SPEC, StateSlots(STATE_SPEC.slot_bytes, 2, 0), CPU, 2)
    pool.pages.normal_()
    pool.states.storage.random_()
    return pool, pool.states


def faults_of(pool: KVPool, transfers: Transfers) -> list[int]:
    pool.transfer(transfers)
    assert pool.swap_check is not None
    return pool.swap_check.faults()


def test_pages_and_states_that_come_back_with_other_bytes_are_named() -> None:
    pool, states = make_pool()
    pool.transfer(
        Transfers(
            swap_out=[PageSwap(page, 3 - page) for page in range(4)],
            states_out=[StateSwap(0, 1), StateSwap(1, 0)],
        )
    )
    assert pool.swap_check is None
    pool.host_pages.view(torch.uint8)[2, 7] ^= 1
    states.host_states[1].view(-1)[-1] ^= 128
    back = Transfers(
        swap_in=[PageSwap(0, 3), PageSwap(1, 2), PageSwap(2, 1)],
        states_in=[StateSwap(1, 0), StateSwap(0, 1)],
    )
    assert faults_of(pool, back) == [1, 4]  # states follow pages
    assert faults_of(pool, Transfers(swap_in=[PageSwap(3, 0)])) == []
    assert faults_of(pool, Transfers(states_in=[StateSwap(0, 0)])) == []


def test_bytes_are_proved_when_others_come_to_their_place_in_the_pass_in_which_they_leave() -> None:
    pool, _ = make_pool()
    pool.transfer(Transfers(swap_out=[PageSwap(1, 0)], states_out=[StateSwap(1, 0)]))
    change = Transfers(
        swap_out=[PageSwap(3, 1)],
        swap_in=[PageSwap(3, 0)],
        states_out=[StateSwap(0, 1)],
        states_in=[StateSwap(0, 0)],
    )
    assert faults_of(pool, change) == []
    assert faults_of(pool, Transfers(swap_in=[PageSwap(0, 1)], states_in=[StateSwap(1, 1)])) == []


def test_hidden_states_of_a_page_are_proved_with_it() -> None:
    pool, _ = make_pool()
    pool.hidden = HiddenPages(4, SPEC.page_size, 6, torch.float32, CPU, 4)
    pool.hidden.pages.normal_()
    pool.transfer(Transfers(swap_out=[PageSwap(1, 0), PageSwap(2, 3)]))
    assert faults_of(pool, Transfers(swap_in=[PageSwap(1, 0), PageSwap(2, 3)])) == []
    pool.hidden.host_pages[3, 5, 5] += 1
    assert faults_of(pool, Transfers(swap_in=[PageSwap(1, 0), PageSwap(2, 3)])) == [1]


def test_bounds_of_a_pages_keys_are_proved_with_it() -> None:
    pool = KVPool(replace(SPEC, num_layers=4), 4, CPU, num_host_pages=4)
    pool.bounds = KeyBounds(pool.spec, 4, 4, CPU, 4)
    pool.bounds.pages.normal_()
    pool.transfer(Transfers(swap_out=[PageSwap(1, 0), PageSwap(2, 3)]))
    assert faults_of(pool, Transfers(swap_in=[PageSwap(1, 0), PageSwap(2, 3)])) == []
    pool.bounds.host_pages.view(torch.uint8)[3, 1, 0, 1, 5] ^= 1
    assert faults_of(pool, Transfers(swap_in=[PageSwap(1, 0), PageSwap(2, 3)])) == [1]
