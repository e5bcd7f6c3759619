"""Requests copies between the device, main memory and the disk, and passes their results to the callers."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_memory import (
    DiskMemory,
    DiskMoved,
    HostMemory,
    LayerwiseLoad,
    Moved,
    PageMove,
    StateMove,
)

_Begun = TypeVar("_Begun")


class _NotBegun:
    """Stands in for a load that could not begin: its pass need not wait for anything."""

    def wait_for_layer(self, layer: int) -> None:
        """Returns at once."""


class Copies:
    """The copies under way. A request that raises is passed on as a result with an error."""

    def __init__(self, host: HostMemory, disk: DiskMemory | None) -> None:
        self.host, self.disk = host, disk
        self._tickets = count()
        self._on_host: dict[int, Callable[[Moved], None]] = {}
        self._on_disk: dict[int, Callable[[DiskMoved], None]] = {}
        self._ended: list[Callable[[], None]] = []
        """Results of requests that raised."""

    @property
    def are_under_way(self) -> bool:
        """True if some copies have not ended."""
        return bool(self._on_host or self._on_disk or self._ended)

    def store(self, moves: Sequence[PageMove], states: Sequence[StateMove], done: Callable[[Moved], None]) -> None:
        """Copies pages and states of the device to main memory."""
        self._request(lambda ticket: self.host.store(ticket, moves, states), done)

    def load(self, moves: Sequence[PageMove], states: Sequence[StateMove], done: Callable[[Moved], None]) -> None:
        """Copies pages and states of main memory to the device."""
        self._request(lambda ticket: self.host.load(ticket, moves, states), done)

    def load_layerwise(self, moves: Sequence[PageMove], done: Callable[[Moved], None]) -> LayerwiseLoad:
        """Copies pages of main memory to the device, layer by layer."""
        layerwise = self.host.layerwise
        assert layerwise is not None, "pages of this memory come whole"
        begun = self._request(lambda ticket: layerwise.load_layerwise(ticket, moves), done)
        return _NotBegun() if begun is None else begun

    def _request(self, start: Callable[[int], _Begun], done: Callable[[Moved], None]) -> _Begun | None:
        """Returns what `start` does, or None if it raises."""
        ticket = next(self._tickets)
        try:
            begun = start(ticket)
        except Exception as error:
            failed = Moved(ticket, 0.0, error=f"{type(error).__name__}: {error}")
            self._ended.append(lambda: done(failed))
            return None
        self._on_host[ticket] = done
        return begun

    def write(self, host_page: int, record: PageRecord, done: Callable[[DiskMoved], None]) -> None:
        """Copies a page of main memory to the disk."""
        if (disk := self.disk) is not None:
            self._request_of_disk(lambda ticket: disk.write(ticket, host_page, record), done)

    def read(self, location: int, host_page: int, done: Callable[[DiskMoved], None]) -> None:
        """Copies a page of the disk to main memory."""
        if (disk := self.disk) is not None:
            self._request_of_disk(lambda ticket: disk.read(ticket, location, host_page), done)

    def _request_of_disk(self, start: Callable[[int], None], done: Callable[[DiskMoved], None]) -> None:
        ticket = next(self._tickets)
        try:
            start(ticket)
        except Exception as error:
            failed = DiskMoved(ticket, 0.0, error=f"{type(error).__name__}: {error}")
            self._ended.append(lambda: done(failed))
        else:
            self._on_disk[ticket] = done

    def take(self) -> None:
        """Passes on the results of copies that have ended."""
        ended, self._ended = self._ended, []
        for end in ended:
            end()
        if self._on_host:
            for moved in self.host.take():
                self._on_host.pop(moved.ticket)(moved)
        if self._on_disk and self.disk is not None:
            for disk_moved in self.disk.take():
                self._on_disk.pop(disk_moved.ticket)(disk_moved)

    def wait(self, timeout_s: float) -> None:
        """Waits until some copy has ended, at most so long; copies of main memory are waited for first."""
        if self._ended:
            return
        if self._on_host:
            self.host.wait(timeout_s)
        elif self._on_disk and self.disk is not None:
            self.disk.wait(timeout_s)
