"""`python -m benchmarks.routing.routes`: how often the queue routes a request, and what its decisions cost in CPU.

The gateway's part is the real one, in front of the simulated engines of `python -m benchmarks.routing`. Routes a
request count every call of the router; CPU is the process time inside of the gateway's queue, without index updates.
"""

import argparse
import time
from collections.abc import Sequence

from benchmarks.routing.__main__ import make_workload
from benchmarks.routing.engine_model import EngineShape
from benchmarks.routing.figures import capacity_s, quantile
from benchmarks.routing.our_gateway import Keys, OurGateway
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.workload import SimulatedRequest, find_mooncake
from benchmarks.routing.world import World
from mini_infer_gateway.flow_control.flow_queue import FlowQueue, QueuedRequest
from mini_infer_gateway.routing.base import Decision

CACHE_TOKENS = 500_000


class TimedQueue(FlowQueue):
    """A queue that adds up the process time of its own work."""

    seconds = 0.0

    def offer(self, entry: QueuedRequest, now_s: float) -> bool:
        """See FlowQueue."""
        began_s = time.process_time()
        try:
            return super().offer(entry, now_s)
        finally:
            self.seconds += time.process_time() - began_s

    def pump(self, endpoint: str, now_s: float) -> None:
        """See FlowQueue."""
        began_s = time.process_time()
        super().pump(endpoint, now_s)
        self.seconds += time.process_time() - began_s


class CountingGateway(OurGateway):
    """The gateway under test, which counts how often it routes."""

    def __init__(self, world: World, keys: Keys) -> None:
        super().__init__(world, keys, "prefix")
        self.queue = self.timed = TimedQueue(self, self.backlog, self.rates, 1 << 30)
        self.requests = self.routes = 0

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """See SimulatedGateway."""
        self.requests += 1
        super().arrive(request, now_s)

    def route(self, entry: QueuedRequest, now_s: float) -> Decision | None:
        """See Outlet."""
        self.routes += 1
        return super().route(entry, now_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line a fleet and load."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing.routes", description=__doc__)
    parser.add_argument("--workload", default="sessions", help="mooncake, sessions or zero reuse (%(default)s)")
    parser.add_argument("--engines", default="8,16,32", help="(%(default)s)")
    parser.add_argument("--loads", default="0.7,1.0,1.5", help="(%(default)s)")
    parser.add_argument("--requests", type=int, help="only so many")
    parser.add_argument("--trace", metavar="FILE", help="the recorded trace")
    options = parser.parse_args(arguments)
    for engines in map(int, options.engines.split(",")):
        workload = make_workload(options.workload, engines, find_mooncake(options.trace))
        if workload is None:
            raise SystemExit("the recorded trace is not here: see python -m benchmarks.routing --help")
        if options.requests:
            workload = workload.first(options.requests)
        shape = EngineShape(CACHE_TOKENS // workload.block_tokens, workload.block_tokens, QWEN_7B_H200)
        whole_s = capacity_s(workload, shape.rates, engines, shape.kv_blocks, shape.max_num_seqs)
        for load in map(float, options.loads.split(",")):
            made: list[CountingGateway] = []

            def make(world: World, made: list[CountingGateway] = made) -> CountingGateway:
                made.append(CountingGateway(world, Keys()))
                return made[-1]

            answers = World(shape, engines, make).run(workload.at(whole_s / load))
            waits = sorted(answer.first_token_s - answer.request.arrival_s for answer in answers)
            gateway = made[0]
            print(
                f"{workload.name}, {engines:2} engines, load {load:g}: {gateway.routes / gateway.requests:5.2f} routes"
                f" and {1e3 * gateway.timed.seconds / gateway.requests:6.3f} ms of CPU a request;"
                f" TTFT mean {sum(waits) / len(waits):.3f} p90 {quantile(waits, 0.9):.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
