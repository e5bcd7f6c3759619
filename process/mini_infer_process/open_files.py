"""Raises the limit of files and connections that a server may have open. Shells hand down 1,024, which a load test
exceeds.
"""

import resource

DESIRED_OPEN_FILES = 65_536


def raise_open_file_limit(desired: int = DESIRED_OPEN_FILES) -> int:
    """Raises this process' own limit as far as it may, up to `desired`; returns the one in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = max(soft, desired if hard == resource.RLIM_INFINITY else min(desired, hard))
    if target > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return target
