"""Lets edits of the file wait while rollouts of `mini-infer up` are paused. Pure; reads no file."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_operator.objects.history import pinned_spec

Object = dict[str, Any]


class PausedEdits:
    """The spec and the presets that run, of a service whose file may have newer ones."""

    def __init__(self) -> None:
        self._spec: Object | None = None
        self._presets: Sequence[Object] = ()

    def running(self, spec: Mapping[str, Any], presets: Sequence[Object]) -> tuple[Object, Sequence[Object]]:
        """Returns spec and presets to run, of those in the file: while `spec` is paused, those from before, with the
        fields of `spec` that restart no engine. At the start there are none from before.
        """
        paused = (spec.get("rollout") or {}).get("paused") is True
        if paused and self._spec is not None:
            return pinned_spec(spec, self._spec), self._presets
        self._spec, self._presets = dict(spec), presets
        return dict(spec), presets
