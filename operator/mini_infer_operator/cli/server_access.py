"""Finds a gateway or a lone engine for commands that talk to one, and sends requests with the key of OPENAI_API_KEY."""

import json
import os
import urllib.error
import urllib.request
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from mini_infer_operator.cli.terminal import printable

PLACES = ("http://127.0.0.1:8080", "http://127.0.0.1:8000")
"""URLs at which a server is looked for: the gateway of `mini-infer up`, then a lone `mini-infer-serve`."""
TIMEOUT_S = 300.0
LOOK_TIMEOUT_S = 5.0


class ServerError(Exception):
    """Raised if the server cannot be reached or refuses; the message says which."""


class UnreachableError(ServerError):
    """Raised if nothing answers at the address."""


def base_url(url: str) -> str:
    """Returns a server's URL without `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def found_server() -> str:
    """Returns OPENAI_BASE_URL if it is set, else the first of the usual places that answers."""
    if url := os.environ.get("OPENAI_BASE_URL"):
        return base_url(url)
    for place in PLACES:
        try:
            open_server(f"{place}/v1/models", timeout_s=LOOK_TIMEOUT_S).close()
            return place
        except UnreachableError:
            continue
        except ServerError:
            return place  # It is there, and what is wrong is said by the next request.
    places = " nor ".join(PLACES)
    raise ServerError(
        f"nobody answers at {places}: start `mini-infer up` or `mini-infer-serve`, or name a server by --url"
    )


def open_server(url: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S) -> Any:
    """Returns the answer to a GET, or to a POST of `body`. Raises ServerError if the server refuses or is not there."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    try:
        return _opener(url).open(urllib.request.Request(url, body, headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise ServerError(f"{url} answered {error.code}: {printable(str(message))}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(
            f"cannot reach {url} ({reason}): is `mini-infer up` or `mini-infer-serve` running? --url says where"
        ) from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Returns an opener that uses the proxy named by the environment, but no proxy for this machine itself."""
    host = urlsplit(url).hostname or ""
    try:
        is_here = ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))
