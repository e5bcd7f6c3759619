"""Handles the requests that go on to an engine: names the stages of a request in their order.

Each stage is a function in `stages`; all of them work on one `Call` with the parts of the gateway in `Serving`.
"""

from mini_infer_gateway.paths import EnginePath
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.canary.copies import NO_COPIES, Copies
from mini_infer_gateway.pipeline.client_watch import ClientWatch
from mini_infer_gateway.pipeline.failures import answer_failure
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.pipeline.stages.attempt import attempt
from mini_infer_gateway.pipeline.stages.place import place
from mini_infer_gateway.pipeline.stages.read import read
from mini_infer_gateway.pipeline.stages.resolve import resolve
from mini_infer_gateway.pipeline.stages.resume import resume
from mini_infer_gateway.pipeline.stages.session_lease import bound_pin, expect_return
from mini_infer_gateway.pipeline.stages.tokenise import tokenise
from mini_infer_web.asgi import Receive, Scope, Send


class Generate:
    """Handles requests on the paths that engines answer."""

    def __init__(self, serving: Serving, copies: Copies = NO_COPIES) -> None:
        """`copies` sends copies of requests to a canary."""
        self._serving, self._copies = serving, copies
        self.in_flight = 0
        """Number of requests that are being answered or wait for an answer."""

    async def __call__(self, row: EnginePath, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request, from its first byte to the metrics. `scope` contains its "request_id"."""
        call = Call.arrived(row, scope, receive, send, self._serving)
        self.in_flight += 1
        try:
            await self._serve(call)
            call.answered()
        except Exception as error:
            await answer_failure(call, error)
        finally:
            self.in_flight -= 1
            call.close(self._serving)
            self._copies.send(call)

    async def _serve(self, call: Call) -> None:
        """Runs the stages of one request; a request that fails before its first byte is placed and attempted again."""
        serving = self._serving
        await read(call, serving)
        resolve(call, serving)
        with ClientWatch(call, serving):
            await tokenise(call, serving)
            expect_return(call, serving)
            bound_pin(call, serving)
            call.copy = self._copies.take(call)
            cut = None
            while not call.exchange.status:
                cut = await attempt(call, await place(call, serving), serving)
            if cut:
                await resume(call, cut, serving)
