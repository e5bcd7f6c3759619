"""Kubernetes Events about what the operator decides: `kubectl describe` and `kubectl events` show them.

Callers say what they decided and go on; kopf posts beside them, and never fails a reconcile. Decides only what is news.
"""

import contextvars
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from mini_infer_operator.status import EventType

SAME_AGAIN_S = 600.0
"""The same sentence about the same object is posted again at most this often; in between it is dropped."""
REMEMBERED_S = 3600.0
"""The API server forgets an Event after an hour by default, so do we."""
MOST_PER_OBJECT = 20
"""New sentences about one object in SAME_AGAIN_S; more is a fault that repeats in ever new words."""
WAITING_LIMIT = 1000
"""Events that wait for kopf's first handler; older ones are dropped."""

Post = Callable[[Mapping[str, Any], EventType, str, str], None]
"""About what, its type, reason and message."""


class KopfPoster:
    """Posts by kopf, whose queue of Events is known only in the context of one of its handlers of objects."""

    def __init__(self) -> None:
        self._context: contextvars.Context | None = None
        self._waiting: deque[tuple[Mapping[str, Any], EventType, str, str]] = deque(maxlen=WAITING_LIMIT)

    def enter(self) -> None:
        """Takes the context of the handler that calls this. Only the first call has an effect."""
        if self._context is None:
            self._context = contextvars.copy_context()
            while self._waiting:
                self.post(*self._waiting.popleft())

    def post(self, about: Mapping[str, Any], event_type: EventType, reason: str, message: str) -> None:
        """Queues an Event, and returns at once."""
        if self._context is None:
            self._waiting.append((about, event_type, reason, message))
        else:
            body = kopf.Body(about)  # type: ignore[arg-type]  # of which apiVersion, kind and metadata are read
            self._context.run(kopf.event, body, type=event_type, reason=reason, message=message)


class EventRecorder:
    """Posts Events, each sentence once in SAME_AGAIN_S."""

    def __init__(self, post: Post, now_s: Callable[[], float] = time.monotonic) -> None:
        self._post = post
        self._now_s = now_s
        self._posted: dict[str, dict[tuple[str, str], float]] = {}
        """By uid, and reason and message, when it was posted last."""
        self._forgets_s = now_s() + REMEMBERED_S

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        """Tells users of `about` (a manifest with apiVersion, kind and metadata) what was decided; returns at once.

        `reason` is one word in CamelCase. The message should not hold numbers that change from look to look.
        """
        now_s, sentence = self._now_s(), (reason, message)
        self._forget(now_s)
        posted = self._posted.setdefault(str(about["metadata"].get("uid", "")), {})
        is_recent = now_s - posted.get(sentence, -SAME_AGAIN_S) < SAME_AGAIN_S
        is_new = sentence not in posted
        if is_recent or (is_new and sum(now_s - at_s < SAME_AGAIN_S for at_s in posted.values()) >= MOST_PER_OBJECT):
            return
        posted[sentence] = now_s
        self._post(about, event_type, reason, message)

    def _forget(self, now_s: float) -> None:
        """Forgets what was posted long ago, now and then."""
        if now_s < self._forgets_s:
            return
        self._forgets_s = now_s + REMEMBERED_S
        for uid, posted in list(self._posted.items()):
            self._posted[uid] = {sentence: at_s for sentence, at_s in posted.items() if now_s - at_s < REMEMBERED_S}
            if not self._posted[uid]:
                del self._posted[uid]
