import gzip
import zlib

import pytest
import zstandard

from mini_infer_web.api_errors import ApiError
from mini_infer_web.request_body import check_media_type, unpacked, unpacked_in_slices

BODY = b'{"model": "m", "prompt": "' + b"hello " * 50_000 + b'"}'
LIMIT = 10**6
PACKED = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY),
    "GZIP": gzip.compress(BODY),
    "deflate": zlib.compress(BODY),
    "zstd": zstandard.compress(BODY),
    "identity": BODY,
    "": BODY,
    "identity, gzip": gzip.compress(BODY),
}


@pytest.mark.parametrize("encoding", PACKED)
def test_a_compressed_body_is_decompressed(encoding: str) -> None:
    assert unpacked(PACKED[encoding], encoding, LIMIT) == BODY


@pytest.mark.parametrize("encoding", PACKED)
async def test_slices_are_the_whole_body_when_there_is_room(encoding: str) -> None:
    sizes: list[int] = []
    unpacked_body = await unpacked_in_slices(PACKED[encoding], encoding, LIMIT, lambda size: sizes.append(size) is None)
    assert unpacked_body == BODY
    assert sizes[-1] == len(BODY)


async def test_unpacking_stops_when_there_is_no_room_for_more() -> None:
    sizes: list[int] = []

    def reserve(size: int) -> bool:
        sizes.append(size)
        return size < 3 << 20

    assert await unpacked_in_slices(gzip.compress(bytes(16 << 20)), "gzip", 20 << 20, reserve) is None
    assert sizes == [1 << 20, 2 << 20, 3 << 20]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_decompression_stops_at_the_limit(encoding: str) -> None:
    bomb = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}[encoding](bytes(50 * LIMIT))
    assert len(bomb) < LIMIT
    with pytest.raises(ApiError) as caught:
        unpacked(bomb, encoding, LIMIT)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_body_gets_400_when_its_encoding_is_wrong(encoding: str) -> None:
    for damaged in (b"{}", b"x", PACKED[encoding][:8]):
        with pytest.raises(ApiError) as caught:
            unpacked(damaged, encoding, LIMIT)
        assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_gets_400_when_it_is_truncated(encoding: str) -> None:
    with pytest.raises(ApiError, match="ends too early"):
        unpacked(PACKED[encoding][: len(PACKED[encoding]) // 2], encoding, LIMIT)


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip"])
def test_a_body_gets_415_when_its_encoding_is_unknown(encoding: str) -> None:
    with pytest.raises(ApiError) as caught:
        unpacked(BODY, encoding, LIMIT)
    assert caught.value.status == 415


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
def test_json_media_types_are_accepted(media_type: str) -> None:
    check_media_type(media_type)


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_media_type_gets_415_when_a_web_page_could_send_it(media_type: str) -> None:
    with pytest.raises(ApiError, match="application/json") as caught:
        check_media_type(media_type)
    assert caught.value.status == 415
