"""Histograms as plain numbers while requests run; converted to Prometheus' form only when scraped."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily, Metric

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SIZE_BUCKETS = tuple(float(2**exponent) for exponent in range(15))
LENGTH_BUCKETS = tuple(float(2**exponent) for exponent in range(21))
COUNT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Histogram:
    """Counts by bucket; prometheus_client's own takes a lock and a scan for each value, and tokens are many."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @classmethod
    def total(cls, parts: Sequence["Histogram"]) -> "Histogram":
        """Returns the histogram of all values of histograms with the same bounds."""
        made = cls(parts[0]._bounds)
        made._counts = [sum(counts) for counts in zip(*(part._counts for part in parts), strict=True)]
        made._sum = sum(part._sum for part in parts)
        return made

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, as often as it came."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, documentation: str, labels: dict[str, str] | None = None) -> Metric:
        """Returns Prometheus' form: counts up to each bound."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, documentation, labels=list(labels or ()))
        family.add_metric(list((labels or {}).values()), buckets, self._sum)
        return family
