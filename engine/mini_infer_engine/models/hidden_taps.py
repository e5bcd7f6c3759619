"""Hidden states of some layers, kept while a model computes a pass. Knows neither models nor who reads them."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class HiddenTaps:
    """Of the tokens whose logits a pass asks for."""

    def __init__(self, layers: Iterable[int], *, always: bool = True) -> None:
        """`always`: of every pass; else of those that are computed `while_wanted`, and others cost nothing."""
        self.layers = frozenset(layers)
        """From 0."""
        self._always = always
        self._pass = threading.local()  # kernels are compiled by several passes at a time

    @contextmanager
    def while_wanted(self) -> Iterator[None]:
        """Passes that this thread computes meanwhile are kept."""
        self._pass.wanted = True
        try:
            yield
        finally:
            self._pass.wanted = False

    @property
    def is_wanted(self) -> bool:
        """Whether the pass that begins is to be kept."""
        return self._always or getattr(self._pass, "wanted", False)

    def begin(self) -> None:
        """A pass begins: what nobody took of the one before is not needed."""
        self._pass.kept = []

    def keep(self, residual: Tensor, rows: Tensor | None) -> None:
        """The residual stream [tokens, hidden] after one of the layers, or some of its rows; later layers change it."""
        self._pass.kept.append(residual.clone() if rows is None else residual.index_select(0, rows))

    def take(self) -> Tensor:
        """All that were kept of this pass, side by side: [rows, layers * hidden]."""
        kept: list[Tensor] = self._pass.kept
        self._pass.kept = []
        return torch.cat(kept, dim=-1)
