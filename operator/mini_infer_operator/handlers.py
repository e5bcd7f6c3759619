"""Registers kopf's handlers. Each handler calls the `Operator` and decides nothing.

`kopf run -m mini_infer_operator.handlers --dev` works on a cluster from a checkout, and `mini-infer-operator` embeds
the same handlers (controller/run.py). Every event puts a key into the queue, whatever happened, unless it changes
nothing that is read: `kopf.on.event` is the one handler for resources that keeps no progress in annotations and sets no
finalizers. (`kopf.timer` sets one on each object; the queue's resync does its work here.)
"""

import asyncio
import os
from typing import Any

import kopf

from mini_infer_operator import __version__
from mini_infer_operator.controller.kopf_settings import configure, watched
from mini_infer_operator.controller.operator import Operator
from mini_infer_operator.settings import parse_settings
from mini_infer_web.kubernetes_api import AccessError

LOGIN_AGAIN_S = 5.0
DEVELOPMENT = {"MINI_INFER_ENGINE_IMAGE": f"mini-infer-engine-cpu:{__version__}"}
"""Default of the one required flag under `kopf run`, where all flags come from the environment."""


async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Creates the operator, unless `mini-infer-operator` has created it, and starts its work."""
    is_embedded = "embedded" in memo
    if is_embedded:
        await asyncio.sleep(0)  # kopf sets its handlers of signals after this one's first step
        memo.embedded()
    else:
        memo.operator = Operator(parse_settings((), DEVELOPMENT | os.environ))
    configure(settings, scans=not is_embedded)
    await memo.operator.start()


async def log_in(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Returns a session with the official client's configuration, at first and whenever credentials are refused."""
    try:
        return await memo.operator.session()  # type: ignore[no-any-return]  # a memo's attributes have no types
    except AccessError as error:
        raise kopf.TemporaryError(str(error), delay=LOGIN_AGAIN_S) from None


async def observe(event: kopf.RawEvent, memo: kopf.Memo, param: Any = None, **_: Any) -> None:
    """Reports an object that kopf listed or that a watch sent."""
    memo.operator.observe(param, event["type"], event["object"])


async def probe(memo: kopf.Memo, **_: Any) -> list[str]:
    """Answers `kopf run --liveness`. Raises PermanentError, which is an HTTP error there, if only a restart helps."""
    if problems := memo.operator.health.problems():
        raise kopf.PermanentError("; ".join(problems))
    return []


async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Ends all work and gives the Lease back."""
    await memo.operator.stop()


def register(registry: kopf.OperatorRegistry, *, clusterwide: bool) -> kopf.OperatorRegistry:
    """Registers all handlers. Returns the registry.

    Without `clusterwide`, kinds without a namespace have none: kopf would watch them in any case, without the rights.
    """
    kopf.on.startup(registry=registry)(start)
    kopf.on.login(registry=registry)(log_in)
    for kind in watched(clusterwide=clusterwide):
        watch = kopf.on.event(
            group=kind.group, version=kind.version, plural=kind.plural, id=kind.plural, param=kind, registry=registry
        )
        watch(observe)
    kopf.on.probe(id="problems", registry=registry)(probe)
    kopf.on.cleanup(registry=registry)(stop)
    return registry


register(kopf.get_default_registry(), clusterwide=True)  # that of `kopf run`
