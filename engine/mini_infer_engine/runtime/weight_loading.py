"""Fills a model's memory in a thread, while kernels are loaded over it. It knows no files and no peers."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mini_infer_engine.weight_transfer.exchange import FROM_FILES, LoadedWeights


class WeightLoading:
    """Weights that are there, or will be once `wait` returns."""

    def __init__(self, loaded: LoadedWeights = FROM_FILES) -> None:
        """The weights are there, and were loaded in this way."""
        self._future: Future[LoadedWeights] = Future()
        self._future.set_result(loaded)

    @classmethod
    def begin(cls, load: Callable[[], LoadedWeights]) -> "WeightLoading":
        """Begins to load in a thread of its own."""
        made = cls()
        thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        made._future = thread.submit(load)
        thread.shutdown(wait=False)
        return made

    def wait(self) -> LoadedWeights:
        """Waits for the weights, and returns how they were loaded. Raises what loading has raised."""
        return self._future.result()
