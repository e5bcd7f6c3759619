"""Which layers share a page table, and how many pages a sequence needs, from windows alone."""

import pytest

from mini_infer_engine.config.model.kv_groups import KVCacheConfig, kv_cache_config, uniform_kv_cache

GEMMA3_27B = [1024 if (layer + 1) % 6 else None for layer in range(62)]
GEMMA3_12B = [1024 if (layer + 1) % 6 else None for layer in range(48)]
GPT_OSS_20B = [None if layer % 2 else 128 for layer in range(24)]


def shape(kv_cache: KVCacheConfig) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layers)) for group in kv_cache.groups]


@pytest.mark.parametrize(
    ("windows", "layers_per_page", "expected"),
    [
        ([None] * 4, 4, [(None, 4)]),
        ([4096] * 32, 32, [(4096, 32)]),
        (GPT_OSS_20B, 12, [(None, 12), (128, 12)]),
        (GEMMA3_27B, 5, [(None, 5)] * 2 + [(1024, 5)] * 8 + [(1024, 4)] * 3),
        (GEMMA3_12B, 8, [(None, 8)] + [(1024, 8)] * 5),
        ([64, None, 64, 32], 1, [(None, 1), (64, 1), (64, 1), (32, 1)]),
        # One layer of 25 would be unused in pages of 13, and that is little.
        ([None] * 13 + [64] * 12, 13, [(None, 13), (64, 12)]),
        ([None] * 40 + [64] * 3, 5, [(None, 5)] * 8 + [(64, 3)]),
        ([None] * 50 + [64, 64], 5, [(None, 5)] * 10 + [(64, 2)]),
        ([None] * 9 + [8_192], 10, [(None, 10)]),
    ],
    ids=[
        "full",
        "windowed",
        "alternating",
        "gemma3-27b",
        "gemma3-12b",
        "two-windows",
        "padded",
        "few",
        "most",
        "never-left",
    ],
)
def test_groups_have_equal_pages_when_layers_have_windows(
    windows: list[int | None], layers_per_page: int, expected: list[tuple[int | None, int]]
) -> None:
    kv_cache = kv_cache_config(windows, max_model_len=8_192)
    assert kv_cache.layers_per_page == layers_per_page
    assert shape(kv_cache) == expected


@pytest.mark.parametrize("windows", [[None] * 5, [16] * 3, GEMMA3_27B, GPT_OSS_20B, [8, 16, None, 8]])
def test_each_layer_has_a_place_of_its_own_when_grouped(windows: list[int | None]) -> None:
    kv_cache = kv_cache_config(windows, max_model_len=100_000)
    assert len(set(kv_cache.places)) == len(windows) == len(kv_cache.places)
    for layer, (group, place) in enumerate(kv_cache.places):
        assert kv_cache.groups[group].layers[place] == layer
        assert kv_cache.groups[group].window == windows[layer]
        assert place < kv_cache.layers_per_page


GEMMA4_E2B = ([512] * 4 + [None]) * 3
GEMMA4_31B = ([1024] * 5 + [None]) * 10


@pytest.mark.parametrize(
    ("windows", "units", "max_model_len", "units_per_page", "expected"),
    [
        (GEMMA4_E2B, [1 if window else 2 for window in GEMMA4_E2B], 8_192, 6, [(None, 3), (512, 6), (512, 6)]),
        (GEMMA4_31B, [2 if window else 1 for window in GEMMA4_31B], 8_192, 10, [(None, 10)] + [(1024, 5)] * 10),
        (GEMMA4_E2B, [1 if window else 2 for window in GEMMA4_E2B], 512, 18, [(None, 15)]),
        ([64, None, 64, None], [3, 2, 3, 2], 8_192, 6, [(None, 2), (64, 2)]),
        ([None] * 3, [3, 2, 2], 8_192, 12, [(None, 3)]),
    ],
    ids=["e2b", "31b", "no window is left", "no common width", "one group"],
)
def test_a_page_divides_into_layers_of_any_width_when_widths_differ(
    windows: list[int | None],
    units: list[int],
    max_model_len: int,
    units_per_page: int,
    expected: list[tuple[int | None, int]],
) -> None:
    kv_cache = kv_cache_config(windows, max_model_len, units=units)
    assert kv_cache.layers_per_page == units_per_page
    assert shape(kv_cache) == expected
    taken: set[tuple[int, int]] = set()
    for (group, place), width in zip(kv_cache.places, units, strict=True):
        assert units_per_page % width == 0
        own = {(group, unit) for unit in range(place * width, (place + 1) * width)}
        assert max(own)[1] < units_per_page
        assert taken.isdisjoint(own)
        taken |= own


def test_layout_is_that_without_units_when_all_layers_have_one() -> None:
    for windows in (GEMMA3_27B, GPT_OSS_20B, [None] * 5):
        plain, counted = (kv_cache_config(windows, 8_192, units=units) for units in ((), [1] * len(windows)))
        assert (counted.groups, counted.places, counted.layers_per_page) == (
            plain.groups,
            plain.places,
            plain.layers_per_page,
        )


def test_layout_is_uniform_when_nothing_is_ever_behind_a_window() -> None:
    assert uniform_kv_cache(3).is_uniform
    assert kv_cache_config([None, 512], max_model_len=512).is_uniform
    assert not kv_cache_config([None, 512], max_model_len=513).is_uniform
    assert not kv_cache_config([512], max_model_len=513).is_uniform
    latent = kv_cache_config([None] * 2, max_model_len=512, caches_latents=True)
    assert (latent.is_uniform, latent.groups[0].kind) == (True, "latent")


@pytest.mark.parametrize("window", [1, 2, 16, 17, 31])
def test_skipped_tokens_are_those_outside_every_later_window(window: int) -> None:
    (group,) = kv_cache_config([window], max_model_len=100).groups
    for num_computed in range(60):
        seen_by_next = set(range(num_computed - window + 1, num_computed))
        assert not seen_by_next & set(range(group.num_skipped_tokens(num_computed)))
        assert num_computed <= window - 1 or group.num_skipped_tokens(num_computed) == min(
            seen_by_next | {num_computed}
        )


@pytest.mark.parametrize(("page_size", "chunk"), [(16, 1), (16, 40), (32, 7), (64, 100)])
def test_most_pages_bound_what_a_prefill_uses_when_pages_behind_the_window_are_freed(
    page_size: int, chunk: int
) -> None:
    kv_cache = kv_cache_config([None, 50, 50], max_model_len=1_000)
    _, group, _ = kv_cache.groups
    for num_prompt in range(1, 400):
        used, start = 0, 0
        while start < num_prompt:
            end = min(start + chunk, num_prompt)
            allocated = -(-(end + (end == num_prompt)) // page_size)
            used, start = max(used, allocated - group.num_skipped_tokens(start) // page_size), end
        assert used <= group.most_pages(num_prompt + 1, page_size, chunk)


def test_the_longest_sequence_fills_the_pool() -> None:
    for kv_cache in (uniform_kv_cache(2), kv_cache_config([None, 50], 1_000), kv_cache_config([None, 50, 30], 1_000)):
        for num_pages in (0, 1, 2, 7, 30):
            tokens = kv_cache.most_tokens(num_pages, 16, 20)
            assert kv_cache.most_pages(tokens, 16, 20) <= num_pages < kv_cache.most_pages(tokens + 1, 16, 20)
    assert kv_cache_config([50], 1_000).most_tokens(8, 16, 20) > 1 << 30


def test_kv_groups_description_merges_equal_groups() -> None:
    assert str(kv_cache_config([64, None, 64], 1_000)) == (
        "1 layers with all tokens, 2 times 1 layers with a window of 64 tokens"
    )
