"""A process that outlives `mini-infer up` by a moment, to end what `up` started should it be killed outright.

It reads process groups from its standard input (`+1234`, `-1234`) and kills those that are left when the input closes.
The kernel closes it even on SIGKILL. A death signal for each child would miss the children's own children. Run as a
script, so that it costs a bare interpreter; imports nothing of ours.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time

GRACE_S = 3.0


def main() -> None:
    """Follows standard input until it closes, then cleans up."""
    faulthandler.enable()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for number in (signal.SIGTERM, signal.SIGKILL):
        groups = {group for group in groups if _signal(group, number)}
        deadline = time.monotonic() + GRACE_S
        while groups and time.monotonic() < deadline:
            time.sleep(0.05)
            groups = {group for group in groups if _signal(group, 0)}


def _signal(group: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
