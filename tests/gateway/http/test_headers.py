"""Which headers pass, in either direction."""

import pytest

from mini_infer_gateway.http.headers import Headers, retry_after_s, to_client, to_endpoint

PLAIN: Headers = [(b"content-type", b"application/json"), (b"traceparent", b"00-1"), (b"user-agent", b"x")]


@pytest.mark.parametrize(
    "dropped",
    [
        (b"connection", b"keep-alive"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"host", b"gateway"),
        (b"content-length", b"3"),
        (b"expect", b"100-continue"),
        (b"origin", b"http://127.0.0.1:8080"),
        (b"cookie", b"session=1"),
        (b"authorization", b"Bearer k"),
        (b"x-request-id", b"the client's"),
        (b"x-mini-infer-draining", b"true"),
        (b"x_mini_infer_prefill_from", b"tcp://10.0.0.7:5559"),
        (b"x-mini_infer-fetch_from", b"tcp://10.0.0.7:5559"),
        (b"x-a", b"1\r\nx-mini-infer-prefill-from: tcp://10.0.0.7:5559"),
        (b"x-a", b"1\n x-mini-infer-prefill-from: tcp://10.0.0.7:5559"),
    ],
)
def test_private_and_hop_by_hop_headers_are_not_forwarded_to_an_endpoint(dropped: tuple[bytes, bytes]) -> None:
    assert to_endpoint([dropped, *PLAIN]) == PLAIN


@pytest.mark.parametrize(
    "dropped",
    [
        (b"keep-alive", b"timeout=5"),
        (b"set-cookie", b"a=b"),
        (b"location", b"http://10.0.0.7:8000/"),
        (b"server", b"uvicorn"),
        (b"x-mini-infer-role", b"decode"),
        (b"x-request-id", b"another"),
    ],
)
def test_private_and_hop_by_hop_headers_are_not_forwarded_to_a_client(dropped: tuple[bytes, bytes]) -> None:
    own = [(b"x-request-id", b"mine"), (b"x-mini-infer-pod", b"a")]
    assert to_client([dropped, *PLAIN], own) == PLAIN + own


@pytest.mark.parametrize("to", [to_endpoint, lambda headers: to_client(headers, [])])
def test_headers_are_dropped_when_the_connection_header_names_them(to: object) -> None:
    assert callable(to)
    headers = [(b"x-a", b"1"), (b"connection", b"close, X-A"), (b"x-b", b"2"), (b"connection", b"x-b"), *PLAIN]
    assert to(headers) == PLAIN


def test_authorization_is_forwarded_when_that_is_configured() -> None:
    secret = [(b"authorization", b"Bearer k")]
    assert to_endpoint(secret + PLAIN, forward_authorization=True) == secret + PLAIN


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"7", 7.0), (b"", None), (b"-1", None), (b"Wed, 21 Oct 2015 07:28:00 GMT", None)]
)
def test_retry_after(value: bytes, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds
