"""Loads prefixes from lower tiers that other engines have requested, before they are granted. It sends no messages.

A prefix that cannot be loaded, for lack of room or since computing it is faster, is granted as far as it is on the
device.
"""

from mini_infer_contract.blocks import root_key
from mini_infer_engine.core.kv_tiers.tiers import KVTiers, NoTiers
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.kv_transfer.protocol import events

KEEP_S = 5.0
"""Seconds for which loaded blocks are kept for the transfer; pages are pinned as soon as it is granted."""


class PrefixLoads:
    """The requests that wait for a load."""

    def __init__(self, tiers: KVTiers | NoTiers, model_revision: str) -> None:
        self._tiers, self._model_revision = tiers, model_revision
        self._loading: dict[str, tuple[events.KVRequest, Sequence]] = {}

    def begin(self, requested: events.KVRequest) -> bool:
        """Begins to load the prefix of a request. Returns False if there is nothing to wait for."""
        if not self._tiers.is_present:
            return False
        prompt = self._prompt_of(requested)
        is_loading = self._tiers.bring(prompt, KEEP_S)
        if is_loading:
            self._loading[requested.key] = requested, prompt
        return is_loading

    def _prompt_of(self, requested: events.KVRequest) -> Sequence:
        """Returns the prompt of a request as a sequence that will never run. Its tokens name images already."""
        request = Request(
            request_id=requested.key,
            prompt_token_ids=list(requested.token_ids),
            sampling=SamplingParams(),
            cache_salt=requested.cache_salt,
        )
        root = root_key(self._model_revision, salt=requested.cache_salt)
        return Sequence(request, (), 0.0, root, 0, frozenset(), ())

    @property
    def have_ended(self) -> bool:
        """True if `take_ended` has something to return."""
        return any(not self._tiers.is_bringing(prompt) for _, prompt in self._loading.values())

    def take_ended(self) -> list[events.KVRequest]:
        """Returns the requests whose blocks have come, or as many of them as were valid."""
        ended = [key for key, (_, prompt) in self._loading.items() if not self._tiers.is_bringing(prompt)]
        return [self._end(*self._loading.pop(key)) for key in ended]

    def _end(self, requested: events.KVRequest, prompt: Sequence) -> events.KVRequest:
        self._tiers.used_by_peer(prompt)
        return requested

    def drop(self, key: str) -> None:
        """Forgets a request that has ended."""
        self._loading.pop(key, None)

    def clear(self) -> None:
        """Forgets all requests."""
        self._loading.clear()
