"""Watches a cluster from a thread, beside what a test does to it."""

import threading
from abc import ABC, abstractmethod
from typing import Self


class Watcher(ABC):
    """Looks every `every_s` seconds while its block runs."""

    every_s = 0.5

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            self._look()

    @abstractmethod
    def _look(self) -> None:
        """Notes what is to be seen."""
