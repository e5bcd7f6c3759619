"""Collects hidden states of some layers while a model computes a pass. Knows neither models nor the readers."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class HiddenTaps:
    """The hidden states of some layers, for the tokens whose logits a pass requests."""

    def __init__(self, layers: Iterable[int], *, always: bool = True) -> None:
        """Records every pass if `always`; otherwise only passes inside `recording`, and others cost nothing."""
        self.layers = frozenset(layers)
        """The recorded layers, counted from 0."""
        self._always = always
        self._pass = threading.local()  # kernels are compiled by several passes at a time

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the passes that this thread computes inside the context."""
        self._pass.enabled = True
        try:
            yield
        finally:
            self._pass.enabled = False

    @property
    def is_enabled(self) -> bool:
        """True if the next pass is to be recorded."""
        return self._always or getattr(self._pass, "enabled", False)

    def begin(self) -> None:
        """Begins a pass, and drops the states of the last one that nobody took."""
        self._pass.kept = []

    def keep(self, residual: Tensor, rows: Tensor | None) -> None:
        """Copies the residual stream [tokens, hidden] after a layer, or some of its rows: later layers change it."""
        self._pass.kept.append(residual.clone() if rows is None else residual.index_select(0, rows))

    def take(self) -> Tensor:
        """Returns all states of this pass side by side, [rows, layers * hidden], and forgets them."""
        kept: list[Tensor] = self._pass.kept
        self._pass.kept = []
        return torch.cat(kept, dim=-1)
