"""The native decoder's cache: growth, keeping a path, roll-back, digests."""

from __future__ import annotations

import pytest
import torch

from outrider.models.kv import FIRST_CHUNK, DecoderCache

CONTEXT = 600


def new_cache(dtype: torch.dtype = torch.float32) -> DecoderCache:
    return DecoderCache(3, 2, 4, context_length=CONTEXT, dtype=dtype)


def append(cache: DecoderCache, marks: list[int]) -> None:
    """Writes one recognisable pending row for each mark, as a pass would."""
    cache.reserve(len(marks))
    rows = slice(cache.length, cache.length + len(marks))
    for layer, (key, value) in enumerate(zip(cache.keys, cache.values, strict=True)):
        base = torch.tensor(marks, dtype=torch.float32)[:, None, None] + layer / 8
        key[rows] = base.to(key.dtype)
        value[rows] = -base.to(key.dtype)


def marks(cache: DecoderCache) -> list[int]:
    assert all(
        torch.equal(k[: cache.length], -v[: cache.length]) for k, v in zip(cache.keys, cache.values, strict=True)
    )
    return [int(mark) for mark in cache.keys[0][: cache.length, 0, 0]]


def test_a_prefix_is_a_length_change_and_a_path_is_compacted_in_every_layer() -> None:
    cache = new_cache()
    append(cache, [10, 11, 12])
    block = cache.keys[0].data_ptr()
    cache.keep([0, 1])
    assert marks(cache) == [10, 11]
    assert cache.keys[0].data_ptr() == block
    append(cache, [20, 21, 22, 23, 24])
    cache.keep([0, 2, 4])
    assert marks(cache) == [10, 11, 20, 22, 24]
    append(cache, [30, 31])
    cache.keep([1])
    assert marks(cache) == [10, 11, 20, 22, 24, 31]
    assert [float(key[5, 0, 0]) for key in cache.keys] == [31, 31.125, 31.25]
    cache.check_integrity()


def test_keeping_nothing_drops_the_pending_rows() -> None:
    cache = new_cache()
    append(cache, [1, 2])
    cache.keep([])
    assert cache.length == cache.pending == 0
    append(cache, [3])
    cache.keep([0])
    assert marks(cache) == [3]


def test_growth_keeps_what_was_committed_and_is_bounded_by_the_context() -> None:
    cache = new_cache()
    assert cache.nbytes == 0
    for mark in range(CONTEXT):
        append(cache, [mark])
        cache.keep([0])
    assert marks(cache) == list(range(CONTEXT))
    assert cache.capacity == CONTEXT
    assert cache.nbytes == 3 * 2 * CONTEXT * 2 * 4 * 4
    cache.check_integrity()


def test_a_long_first_pass_gets_all_its_room_at_once() -> None:
    cache = new_cache()
    append(cache, list(range(FIRST_CHUNK + 5)))
    cache.keep(range(FIRST_CHUNK + 5))
    assert cache.length == FIRST_CHUNK + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_forgets_what_was_appended_and_rolled_back(dtype: torch.dtype) -> None:
    plain, drafted = new_cache(dtype), new_cache(dtype)
    for cache in (plain, drafted):
        append(cache, [1, 2, 3])
        cache.keep([0, 1, 2])
    before = plain.digest()
    append(drafted, [7, 8, 9])
    assert drafted.digest() == before
    drafted.keep([0, 1])
    assert drafted.digest() != before
    drafted.truncate(3)
    assert drafted.digest() == before
    append(drafted, [4, 5])
    drafted.keep([])
    for cache in (plain, drafted):
        append(cache, [6])
        cache.keep([0])
    assert drafted.digest() == plain.digest() != before


def test_digest_sees_every_layer_and_every_value() -> None:
    cache = new_cache()
    append(cache, [1, 2])
    cache.keep([0, 1])
    before = cache.digest()
    cache.values[2][1, 1, 3] += 1e-3
    assert cache.digest() != before


def test_integrity_is_checked() -> None:
    cache = new_cache()
    append(cache, [1])
    cache.check_integrity()
    cache.length = cache.capacity
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_misuse_is_caught() -> None:
    cache = new_cache()
    append(cache, [1, 2])
    with pytest.raises(AssertionError, match="not increasing"):
        cache.keep([1, 0])
    with pytest.raises(AssertionError, match="pending rows"):
        cache.keep([0, 2])
    cache.keep([0, 1])
    with pytest.raises(AssertionError, match="pending rows"):
        cache.keep([0])
    with pytest.raises(AssertionError, match="truncate"):
        cache.truncate(3)


def test_free_gives_the_memory_back_and_ends_the_cache() -> None:
    cache = new_cache()
    append(cache, [1])
    cache.free()
    assert cache.nbytes == 0
    cache.check_integrity()
    with pytest.raises(AssertionError, match="freed"):
        cache.reserve(1)


def test_a_cache_filled_in_inference_mode_can_be_used_outside_it() -> None:
    cache = new_cache()
    with torch.inference_mode():
        append(cache, [1, 2, 3])
    cache.keep([0, 2])
    assert marks(cache) == [1, 3]
    with torch.inference_mode():
        append(cache, [4])
    cache.truncate(1)
    assert marks(cache) == [1]
