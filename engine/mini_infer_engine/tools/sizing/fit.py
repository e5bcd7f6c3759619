"""Decides how many engines of which size serve a load within latency targets. Pure arithmetic over modelled passes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log, sqrt

from mini_infer_engine.tools.sizing.gpu import MOST_ROWS, Gpu
from mini_infer_engine.tools.sizing.memory import kv_tokens
from mini_infer_engine.tools.sizing.pass_times import PassTimes
from mini_infer_engine.tools.sizing.shape import ModelShape

_QUANTILE = 0.05
"""Share of requests that may wait longer for their first token than the target."""
_HALVINGS = 40
_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to serve."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Tokens of a prompt that are found in the prefix cache."""

    @property
    def context(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The latencies to keep, in seconds."""

    ttft_s: float
    """Time to the first token at the 95th percentile."""
    itl_s: float
    """Mean time between tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One engine under a share of the load."""

    ttft_s: float
    itl_s: float
    rows: float
    """Sequences that decode at the same time, on average."""
    kv_share: float
    """Share of the KV cache in use at busy moments."""

    @property
    def busy_rows(self) -> int:
        """Sequences that decode at busy moments: two standard deviations above the average."""
        return ceil(self.rows + 2 * sqrt(self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Engines that serve the load."""

    tensor: int
    replicas: int
    kv_tokens: int
    prediction: Prediction
    """Each engine with its share of the load."""
    engine_requests_per_s: float
    """Most requests a second for one engine within the targets."""
    bound: str
    """The limit that keeps one engine from serving more."""

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.tensor * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFit:
    """Says why no engine serves the load within the targets, and which targets or sizes would do."""

    reasons: tuple[str, ...]
    """One for each number of GPUs that was tried."""
    remedy: str


def size(shape: ModelShape, gpu: Gpu, load: Load, targets: Targets, tensor_sizes: Sequence[int]) -> Fit | NoFit:
    """Returns the engines that need the fewest GPUs together, and of these the smallest; or why there are none."""
    if load.context > shape.max_context:
        return NoFit(
            reasons=(f"the model's context is {shape.max_context:,} tokens, and requests have {load.context:,}",),
            remedy=f"--prompt-tokens and --output-tokens of {shape.max_context:,} together, or another model",
        )
    engines = [_Engine(shape, gpu, tensor, load) for tensor in tensor_sizes if shape.splits(tensor)]
    fits = [fit for engine in engines if (fit := engine.fit(targets)) is not None]
    if fits:
        return min(fits, key=lambda fit: (fit.gpus, fit.tensor))
    return NoFit(reasons=tuple(engine.reason(targets) for engine in engines), remedy=_remedy(engines, targets))


class _Engine:
    """One engine of `tensor` GPUs, and the load of which it gets a part."""

    def __init__(self, shape: ModelShape, gpu: Gpu, tensor: int, load: Load) -> None:
        self.tensor, self.load = tensor, load
        self.times = PassTimes(shape, gpu, tensor)
        self.kv_tokens = kv_tokens(shape, gpu, tensor)
        self._prefill_s = self.times.prefill_s(load.prompt_tokens - load.cached_tokens, load.cached_tokens)

    def predict(self, requests_per_s: float) -> Prediction | None:
        """Returns latencies at this rate; None if the engine cannot keep up.

        By Little's law so many sequences decode as come while one does; prompts take their share of the time from
        decode passes. A prompt waits for a pass, and for prompts before it as in a queue with Poisson arrivals and
        equal services (M/D/1), whose tail is taken to be exponential.
        """
        load, busy = self.load, requests_per_s * self._prefill_s
        if busy >= 1:
            return None
        middle = load.prompt_tokens + load.output_tokens / 2
        rows, itl_s = 0.0, 0.0
        for _ in range(_ROUNDS):
            itl_s = self.times.decode_s(max(1.0, rows), middle) / (1 - busy)
            before, rows = rows, requests_per_s * load.output_tokens * itl_s
            if abs(rows - before) < 1e-3:
                break
            if rows > 4 * MOST_ROWS:
                return None
        pass_s = self.times.decode_s(max(1.0, rows), middle)
        mean_wait_s = busy * self._prefill_s / (2 * (1 - busy))
        wait_s = mean_wait_s / busy * log(busy / _QUANTILE) if busy > _QUANTILE else 0.0
        found = Prediction(ttft_s=wait_s + pass_s + self._prefill_s, itl_s=itl_s, rows=rows, kv_share=0.0)
        return replace(found, kv_share=(found.busy_rows + 1) * load.context / max(1, self.kv_tokens))

    def exceeded(self, prediction: Prediction | None, targets: Targets) -> str | None:
        """Returns the limit that a prediction exceeds, or None."""
        too_many = f"a batch of {MOST_ROWS} sequences, beyond which nothing was measured"
        if prediction is None:
            return too_many
        if prediction.kv_share > 1:
            return f"the KV cache: it has {self.kv_tokens:,} tokens"
        if prediction.itl_s > targets.itl_s:
            return f"the time between tokens: {targets.itl_s * 1e3:g} ms"
        if prediction.ttft_s > targets.ttft_s:
            return f"the time to the first token: {targets.ttft_s * 1e3:g} ms"
        if prediction.busy_rows > MOST_ROWS:
            return too_many
        return None

    def fit(self, targets: Targets) -> Fit | None:
        """Returns as many of these engines as the load needs; None if not even one request is within the targets."""
        if self.kv_tokens <= 0 or self.exceeded(self.predict(0.0), targets) is not None:
            return None
        low, high = 0.0, 1 / self._prefill_s
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.exceeded(self.predict(middle), targets) else (middle, high)
        if low == 0.0:
            return None
        replicas = max(1, ceil(self.load.requests_per_s / low - 1e-6))
        prediction = self.predict(min(low, self.load.requests_per_s / replicas))
        bound = self.exceeded(self.predict(high), targets)
        assert prediction is not None, "the engine keeps up at the lower of the two rates"
        assert bound is not None, "the higher of the two rates is too much"
        return Fit(
            tensor=self.tensor,
            replicas=replicas,
            kv_tokens=self.kv_tokens,
            prediction=prediction,
            engine_requests_per_s=low,
            bound=bound,
        )

    def reason(self, targets: Targets) -> str:
        """Says why these engines do not fit."""
        gpus = "one GPU" if self.tensor == 1 else f"{self.tensor} GPUs an engine"
        if self.kv_tokens <= 0:
            return f"{gpus}: the weights leave no memory for the KV cache"
        idle = self.predict(0.0)
        assert idle is not None, "an idle engine keeps up"
        if idle.kv_share > 1:
            return f"{gpus}: the KV cache has {self.kv_tokens:,} tokens, a request needs {self.load.context:,}"
        return (
            f"{gpus}: an idle engine takes {idle.ttft_s * 1e3:.1f} ms to the first token and {idle.itl_s * 1e3:.2f} "
            f"ms between tokens, which leaves no room under {targets.ttft_s * 1e3:g} and {targets.itl_s * 1e3:g}"
        )


def _remedy(engines: Sequence[_Engine], targets: Targets) -> str:
    """Returns targets that the fastest of these engines keeps with a tenth to spare."""
    idle = [
        found
        for engine in engines
        if engine.kv_tokens > 0 and (found := engine.predict(0.0)) is not None and found.kv_share <= 1
    ]
    if not idle:
        return "a GPU with more memory, a higher --max-tensor, a smaller model or shorter requests"
    best = min(idle, key=lambda found: max(found.ttft_s / targets.ttft_s, found.itl_s / targets.itl_s))
    ttft, itl = max(targets.ttft_s, 1.1 * best.ttft_s), max(targets.itl_s, 1.1 * best.itl_s)
    return f"--ttft {ceil(ttft * 1e4) / 10:g} --itl {ceil(itl * 1e5) / 100:g}, with the same requests"
