"""`mini-infer-serve`, before anything else is imported: from here on SIGTERM ends the process.

An engine is the first process of its container, which the kernel spares the default action of a signal: one that came
while modules are imported, for seconds on a busy node, would be lost, and a pod that is over would load its model and
keep its GPU until its grace period ends. The images have it blocked until here, while Python itself starts.
"""

import signal

from mini_infer_process.endings import ends_quietly
from mini_infer_process.extras import missing_packages_name_the_extra


def main() -> int:
    """Runs the command, and returns the exit status."""
    with ends_quietly("mini-infer-serve"), missing_packages_name_the_extra("mini-infer-serve", "engine"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        from mini_infer_engine.server.cli import main as serve

        return serve()
