"""What browsers are told, by what is allowed and by what they ask."""

import pytest

from mini_infer_web.cors import CorsPolicy, Headers

PAGE = (b"origin", b"https://chat.example.com")
OTHER = (b"origin", b"https://evil.example.com")
REQUEST_METHOD = (b"access-control-request-method", b"POST")
REQUEST_HEADERS = (b"access-control-request-headers", b"authorization, content-type")
NAMED = CorsPolicy(allowed_origins=("https://chat.example.com",))


def of(headers: Headers) -> dict[str, str]:
    answered = {name.decode().removeprefix("access-control-"): value.decode() for name, value in headers}
    assert len(answered) == len(headers)
    return answered


def test_cors_is_off_when_no_origins_are_named() -> None:
    assert CorsPolicy().answer_headers([PAGE]) == CorsPolicy().preflight_headers([PAGE, REQUEST_METHOD]) == []


def test_cors_allows_every_origin_when_a_star_is_given() -> None:
    policy = CorsPolicy(allowed_origins=("*",))
    assert of(policy.answer_headers([PAGE]))["allow-origin"] == "*"
    assert policy.answer_headers([]) == []


def test_vary_names_origin_when_origins_are_listed() -> None:
    assert of(NAMED.answer_headers([PAGE])) == {
        "vary": "Origin",
        "allow-origin": "https://chat.example.com",
        "expose-headers": "x-request-id, request-id, retry-after",
    }
    assert of(NAMED.answer_headers([OTHER])) == {"vary": "Origin"}
    assert NAMED.preflight_headers([OTHER, REQUEST_METHOD]) == []


@pytest.mark.parametrize("origins", [("*",), ("https://chat.example.com",)])
def test_cors_never_allows_credentials_for_a_star(origins: tuple[str, ...]) -> None:
    answered = of(CorsPolicy(allowed_origins=origins, allow_credentials=True).answer_headers([PAGE]))
    assert (answered["allow-origin"], answered["allow-credentials"]) == ("https://chat.example.com", "true")


def test_a_preflight_repeats_the_requested_headers_when_all_are_allowed() -> None:
    assert of(NAMED.preflight_headers([PAGE, REQUEST_METHOD, REQUEST_HEADERS])) == {
        "allow-methods": "POST",
        "allow-headers": "authorization, content-type",
        "max-age": "600",
    }
    assert "allow-headers" not in of(NAMED.preflight_headers([PAGE, REQUEST_METHOD]))
    assert NAMED.preflight_headers([PAGE]) == [], "OPTIONS that no browser asked"


def test_a_preflight_names_the_allowed_methods_and_headers() -> None:
    policy = CorsPolicy(allowed_origins=("*",), allowed_methods=("GET", "POST"), allowed_headers=("authorization",))
    answered = of(policy.preflight_headers([PAGE, REQUEST_METHOD, REQUEST_HEADERS]))
    assert (answered["allow-methods"], answered["allow-headers"]) == ("GET, POST", "authorization")
