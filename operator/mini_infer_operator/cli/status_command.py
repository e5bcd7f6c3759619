"""Runs `mini-infer status` and `mini-infer why` on services in a cluster, or of `mini-infer up` in this folder."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from mini_infer_operator.cli import cluster
from mini_infer_operator.cli.terminal import printable
from mini_infer_operator.cli.views import LOG_LINES, condition, explanation, status_table, troubled_pods
from mini_infer_operator.local.status_file import ROOT, log_tails, read_statuses
from mini_infer_web.kubernetes_api import NETWORK_ERRORS, AccessError, ApiError, ApiServer

NOT_READY = 1
FAILED = 2


def show_status(name: str | None, namespace: str, *, everywhere: bool, local: bool) -> int:
    """Prints a table of services. Returns the exit code: 0 if all that are shown are ready."""
    found = [item for item in read_statuses() if name in {None, item["metadata"]["name"]}]
    if not local:

        async def read(server: ApiServer) -> int:
            nonlocal found
            if name is not None and everywhere:
                named = [item for item in await cluster.services(server, None) if item["metadata"]["name"] == name]
                if not named and not found:
                    raise cluster.NotFoundError(f"there is no InferenceService {name} in any namespace")
                found += named
            elif name is not None:
                found += [await cluster.service(server, namespace, name)]
            else:
                found += await cluster.services(server, None if everywhere else namespace)
            return 0

        failed = in_cluster("status", read, quiet=bool(found))
        if failed and not found:
            return failed
    if not found:
        where = f"in this folder ({ROOT})" if local else f"in namespace {namespace}; -A shows all namespaces"
        if name is not None and local:
            print(f"mini-infer status: no `mini-infer up` of {name} runs from this folder", file=sys.stderr)
            return FAILED
        print(f"no InferenceService {where}")
        return 0
    print(printable("\n".join(status_table(found, datetime.now(UTC)))))
    return 0 if all(condition(item, "Ready").get("status") == "True" for item in found) else NOT_READY


def show_why(name: str, namespace: str, *, local: bool) -> int:
    """Prints all known reasons for a service's state. Returns the exit code: 0 if the service is ready."""
    here = [item for item in read_statuses() if item["metadata"]["name"] == name]
    if here:
        (service,) = here
        lines = explanation(service, [], log_tails(ROOT / name, LOG_LINES), [], datetime.now(UTC))
        print(printable("\n".join(line for line in lines if line not in {"Engines", "  there are none"})))
        return 0 if condition(service, "Ready").get("status") == "True" else NOT_READY
    if local:
        print(f"mini-infer why: no `mini-infer up` of {name} runs from this folder", file=sys.stderr)
        return FAILED

    async def read(server: ApiServer) -> int:
        service = await cluster.service(server, namespace, name)
        pods = await cluster.children(server, "Pod", namespace, name)
        deployments = await cluster.children(server, "Deployment", namespace, name)
        logs = {
            pod: await cluster.log_tail(server, namespace, pod, lines=LOG_LINES, previous=previous)
            for pod, previous in troubled_pods(pods)
        }
        about = {name, *(item["metadata"]["name"] for item in (*pods, *deployments))}
        events = await cluster.warnings(server, namespace, about)
        print(printable("\n".join(explanation(service, pods, logs, events, datetime.now(UTC)))))
        return 0 if condition(service, "Ready").get("status") == "True" else NOT_READY

    return in_cluster("why", read)


def in_cluster(command: str, work: Callable[[ApiServer], Awaitable[int]], *, quiet: bool = False) -> int:
    """Runs `work` with a connection and prints errors as one line. Returns the exit code."""

    async def connected() -> int:
        async with ApiServer() as server:
            await server.connect()
            return await work(server)

    try:
        return asyncio.run(connected())
    except AccessError as error:
        message = f"{error}; and nothing runs in this folder: `mini-infer up -f FILE`"
    except cluster.NotFoundError as error:
        message = str(error)
    except ApiError as error:
        message = f"the API server says: {error.message}"
    except NETWORK_ERRORS as error:
        message = f"the API server does not answer: {error or type(error).__name__}"
    if not quiet:
        print(f"mini-infer {command}: {message}", file=sys.stderr)
    return FAILED
