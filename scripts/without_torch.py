"""Copies a lock file with hashes without torch and what it alone brings, which scripts/install_torch.sh chooses.

usage: without_torch.py < LOCKED > OUTPUT
"""

import re
import sys

CHOSEN_BY_THE_MACHINE = re.compile(r"(torch|triton|nvidia-|cuda-)")
entries = re.split(r"(?m)^(?=[A-Za-z0-9])", sys.stdin.read())
sys.stdout.write("".join(entry for entry in entries if not CHOSEN_BY_THE_MACHINE.match(entry)))
