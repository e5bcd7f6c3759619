"""Records Kubernetes Events about the operator's decisions: `kubectl describe` and `kubectl events` show them.

Callers report a decision and go on. kopf posts the Event in the background, and a failed post never fails a reconcile.
This module only decides which Events are new.
"""

import contextvars
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from mini_infer_operator.status import EventType

SAME_AGAIN_S = 600.0
"""Seconds between two posts of one message about one object; repeats in between are dropped."""
DEDUPLICATION_S = 3600.0
"""Seconds for which a posted message is remembered, as long as the API server keeps an Event by default."""
MOST_PER_OBJECT = 20
"""New messages about one object within SAME_AGAIN_S; more come from a fault that changes its words each time."""
WAITING_LIMIT = 1000
"""Events that may wait for kopf's first handler; older ones are dropped."""

Post = Callable[[Mapping[str, Any], EventType, str, str], None]
"""Posts an Event: the object it is about, its type, its reason and its message."""


class KopfPoster:
    """Posts Events through kopf, whose queue of Events exists only in the context of its object handlers."""

    def __init__(self) -> None:
        self._context: contextvars.Context | None = None
        self._waiting: deque[tuple[Mapping[str, Any], EventType, str, str]] = deque(maxlen=WAITING_LIMIT)

    def enter(self) -> None:
        """Copies the calling handler's context. Only the first call has an effect."""
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
    """Posts Events, each message at most once in SAME_AGAIN_S."""

    def __init__(self, post: Post, now_s: Callable[[], float] = time.monotonic) -> None:
        self._post = post
        self._now_s = now_s
        self._posted: dict[str, dict[tuple[str, str], float]] = {}
        """The time of the last post, by the object's uid, then by reason and message."""
        self._next_cleanup_s = now_s() + DEDUPLICATION_S

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        """Posts an Event about `about` (a manifest with apiVersion, kind and metadata) and returns at once.

        `reason` is one word in CamelCase. The message should contain no numbers that change from pass to pass.
        """
        now_s, sentence = self._now_s(), (reason, message)
        self._clean_up(now_s)
        posted = self._posted.setdefault(str(about["metadata"].get("uid", "")), {})
        is_recent = now_s - posted.get(sentence, -SAME_AGAIN_S) < SAME_AGAIN_S
        is_new = sentence not in posted
        if is_recent or (is_new and sum(now_s - at_s < SAME_AGAIN_S for at_s in posted.values()) >= MOST_PER_OBJECT):
            return
        posted[sentence] = now_s
        self._post(about, event_type, reason, message)

    def _clean_up(self, now_s: float) -> None:
        """Forgets messages posted more than DEDUPLICATION_S ago; runs once in DEDUPLICATION_S."""
        if now_s < self._next_cleanup_s:
            return
        self._next_cleanup_s = now_s + DEDUPLICATION_S
        for uid, posted in list(self._posted.items()):
            self._posted[uid] = {sentence: at_s for sentence, at_s in posted.items() if now_s - at_s < DEDUPLICATION_S}
            if not self._posted[uid]:
                del self._posted[uid]
