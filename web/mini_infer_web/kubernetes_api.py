"""Sends requests to a Kubernetes API server through the official client: JSON in and out, errors in the server's words.

Gateway, operator and commands reach the API server through this module alone. Credentials are those of
`kubernetes.aio.config`: a pod's service account, or kubeconfig files with certificates, tokens, `exec` plugins, OIDC
and proxies. Requests go through its dynamic client. The module knows no kinds, and repeats a request only if its
credentials were refused.

Imports aiohttp and kubernetes, which are requirements of the extras `gateway` and `operator` alone.
"""

import asyncio
import os
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException, load_incluster_config
from kubernetes.aio.config.incluster_config import SERVICE_TOKEN_FILENAME
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger
from kubernetes.aio.dynamic import DynamicClient

REQUEST_TIMEOUT_S = 30.0
CREDENTIALS_LIMIT_S = 60.0
"""Seconds after which a credential plugin is killed."""
DEFAULT_KUBECONFIG = "~/.kube/config"
UNAUTHORIZED = 401

Object = dict[str, Any]
RequestSeen = Callable[[str, str, Mapping[str, str], int | None], None]
"""Takes a request's method, path and query, and the status of its answer: None if no answer came."""
Verb = Callable[[DynamicClient], Awaitable[aiohttp.ClientResponse]]
"""A call of the dynamic client with `serialize=False`."""


class AccessError(ConnectionError):
    """No API server can be reached with the credentials found; the message says what is missing and what to write.

    It is a ConnectionError because credentials come and go as networks do: code that retries one retries the other.
    """


class ApiError(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        """metav1.Status.reason, such as Forbidden, AlreadyExists or Expired; "" if the answer has none."""
        self.message = message
        """metav1.Status.message: the server's sentence, without the HTTP around it."""


NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
"""No answer came, or no credentials were found (AccessError). All of these errors may be transient."""
REQUEST_ERRORS = (ApiError, *NETWORK_ERRORS)


async def load_configuration(kubeconfig: str | None = None) -> Configuration:
    """Loads the configuration of `kubeconfig` if given, else the pod's service account, else KUBECONFIG, else ~/.kube.

    Runs a credential plugin if the kubeconfig names one. Raises AccessError if none of them can be used.
    """
    configuration, source = Configuration(), "the pod's service account"
    configuration.client_go_retries = True  # reads that are put off (429, 503 with Retry-After) are repeated then
    try:
        async with asyncio.timeout(CREDENTIALS_LIMIT_S + 2):  # after its plugin was killed
            if kubeconfig is None and _is_in_cluster():
                load_incluster_config(client_configuration=configuration)
            else:
                files = kubeconfig or os.environ.get("KUBECONFIG") or DEFAULT_KUBECONFIG
                source = f"kubeconfig {files}"
                await _load_files(files, source, configuration)
    except TimeoutError:
        raise AccessError(
            f"{source}: no credentials within {CREDENTIALS_LIMIT_S:g} s: run its plugin by hand"
        ) from None
    except (ConfigException, yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, AccessError):
            raise
        raise AccessError(f"{source} cannot be used: {type(error).__name__}: {error}") from None
    token = configuration.api_key.get("BearerToken", "").strip()
    if not token.isascii() or not token.isprintable():
        raise AccessError(f"{source}: the token must be one line of printable ASCII")
    if token:
        configuration.api_key["BearerToken"] = token
    # aiohttp would look for proxies and .netrc in two threads at each request.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.proxy = configuration.proxy or _environment_proxy(configuration.host)
    return configuration


def current_namespace() -> str:
    """Returns the namespace of a request that names none, as kubectl does: the pod's own, else that of the kubeconfig's
    current context, else "default", also where no kubeconfig can be read.
    """
    try:
        if _is_in_cluster():
            return Path(SERVICE_TOKEN_FILENAME).with_name("namespace").read_text().strip() or "default"
        files = os.environ.get("KUBECONFIG") or DEFAULT_KUBECONFIG
        if not _is_any(files):
            return "default"
        config = KubeConfigMerger(files).config.value
        contexts = {context.value["name"]: context.value["context"] for context in config["contexts"]}
        return str(contexts[config["current-context"]].get("namespace") or "default")
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, OSError):
        return "default"


def _environment_proxy(server: str) -> str | None:
    """Returns the proxy that HTTPS_PROXY or HTTP_PROXY name for this URL, unless NO_PROXY excepts it."""
    url = urllib.parse.urlsplit(server)
    return None if urllib.request.proxy_bypass(url.netloc) else urllib.request.getproxies().get(url.scheme)


def _is_in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and Path(SERVICE_TOKEN_FILENAME).exists()


def _is_any(files: str) -> bool:
    return any(Path(file).expanduser().exists() for file in files.split(os.pathsep) if file)


async def _load_files(files: str, source: str, configuration: Configuration) -> None:
    if not _is_any(files):
        raise AccessError(f"no cluster found (there is no {files}, and this is no pod): set KUBECONFIG to a kubeconfig")
    merged = KubeConfigMerger(files).config
    users = merged.value["users"]
    plugins = {user.value["name"] for user in users if _bounded(user.value["user"], Path(user.path).parent)}
    loader = KubeConfigLoader(config_dict=merged, config_base_path=None)
    await loader.load_and_set(configuration)
    # The loader logs what a plugin fails with, and goes on without credentials.
    has_credentials = "BearerToken" in configuration.api_key or configuration.cert_file
    if loader.current_context["context"].get("user") in plugins and not has_credentials:
        raise AccessError(f"{source}: a credential plugin failed (logged above): run it by hand")


def _bounded(user: Object, folder: Path) -> bool:
    """Makes a user's credential plugin end with its children after CREDENTIALS_LIMIT_S. Returns True if it has one.

    A command with a slash is relative to its kubeconfig, as in kubectl; the client's loader does neither.
    """
    plugin = user.get("exec")
    if plugin:
        command = str(folder / plugin["command"]) if "/" in plugin["command"] else plugin["command"]
        limit = ["--kill-after=1", f"{CREDENTIALS_LIMIT_S:g}", command]
        user["exec"] = {**plugin, "command": "timeout", "args": [*limit, *(plugin.get("args") or ())]}
    return bool(plugin)


def traced(seen: RequestSeen) -> aiohttp.TraceConfig:
    """Returns a trace for aiohttp sessions that reports each request to `seen` once its answer begins."""

    async def ended(_: object, __: object, params: aiohttp.TraceRequestEndParams) -> None:
        seen(params.method, params.url.path, params.url.query, params.response.status)

    async def failed(_: object, __: object, params: aiohttp.TraceRequestExceptionParams) -> None:
        seen(params.method, params.url.path, params.url.query, None)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(ended)
    trace.on_request_exception.append(failed)
    return trace


class _PlainClient(ApiClient):
    """Sends plain JSON as it is."""

    def sanitize_for_serialization(self, obj: Any) -> Any:
        """Returns `obj` unchanged; the base class would search all of it for models and dates."""
        return obj


class ApiServer:
    """A pool of connections to one API server. Raises REQUEST_ERRORS."""

    def __init__(
        self,
        load: Callable[[], Awaitable[Configuration]] = load_configuration,
        seen: RequestSeen | None = None,
    ) -> None:
        """Loads the configuration with the first request, and again once the API server refuses the credentials.

        `seen` is called for each request.
        """
        self._load = load
        self._traces = [traced(seen)] if seen is not None else None
        self._client: DynamicClient | None = None
        self._loading = asyncio.Lock()

    async def close(self) -> None:
        """Closes the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> DynamicClient:
        """Returns the client. Raises AccessError if no API server can be reached with the credentials found."""
        async with self._loading:
            if self._client is None:
                configuration = await self._load()
                configuration.trace_configs = self._traces
                # Without `await`: discovery would ask for every group, and every resource is known here by its path.
                self._client = DynamicClient(_PlainClient(configuration))
            return self._client

    async def send(self, verb: Verb) -> aiohttp.ClientResponse:
        """Returns the answer with its body unread; the caller releases it. Raises ApiError for a status from 400."""
        client = await self.connect()
        try:
            try:
                return await verb(client)
            except ApiException as error:
                if error.status != UNAUTHORIZED:
                    raise
            if self._client is client:  # the first of those that were refused gets new credentials for all of them
                await self.close()
            return await verb(await self.connect())
        except ApiException as error:
            raise _api_error(error.status or 0, error.body or error.reason or "") from None

    async def read(self, verb: Verb) -> Object:
        """Returns the answer as JSON. Raises ApiError if it is no JSON object."""
        async with await self.send(verb) as response:
            body = await response.read()
        try:
            return msgspec.json.decode(body, type=Object)
        except msgspec.MsgspecError:
            raise ApiError(response.status, "", f"the answer is no JSON object: {body[:100]!r}") from None

    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeouts: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """Requests an absolute path, such as /api/v1/pods. Returns and raises as `send` does.

        The default of `timeouts`, REQUEST_TIMEOUT_S, covers the body too.
        """
        return await self.send(_by_path(method, path, query or {}, body, content_type, timeouts))

    async def request(self, method: str, path: str, **options: Any) -> Object:
        """Requests a path as `open` does, and returns the answer as JSON."""
        query, body = options.pop("query", None) or {}, options.pop("body", None)
        content_type, timeouts = options.pop("content_type", "application/json"), options.pop("timeouts", None)
        return await self.read(_by_path(method, path, query, body, content_type, timeouts))


def call_options(timeouts: aiohttp.ClientTimeout | None = None) -> dict[str, Any]:
    """Returns the options of every call of the dynamic client here: a deadline, and no decoding of the answer."""
    return {"serialize": False, "_request_timeout": timeouts or aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)}


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the events of a watch, as lines of any length: an object may be longer than aiohttp's line limit.

    `kubernetes.aio.watch` is not used: it requests no bookmarks, and creates a TLS context for each watch.
    """
    buffer = b""
    async for piece in response.content.iter_any():
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line:
                yield line


def _by_path(
    method: str,
    path: str,
    query: Mapping[str, str],
    body: Any,
    content_type: str,
    timeouts: aiohttp.ClientTimeout | None,
) -> Verb:
    async def verb(client: DynamicClient) -> aiohttp.ClientResponse:
        return await client.request(  # type: ignore[no-any-return]  # kubernetes' dynamic client has no annotations
            method,
            path,
            body=body,
            query_params=list(query.items()),
            content_type=content_type,
            **call_options(timeouts),
        )

    return verb


def _api_error(status: int, body: str) -> ApiError:
    try:
        answer = msgspec.json.decode(body, type=Object)
        return ApiError(status, str(answer.get("reason", "")), str(answer["message"]))
    except (msgspec.MsgspecError, KeyError):
        return ApiError(status, "", body[:300].strip() or "no explanation")
