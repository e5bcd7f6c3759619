"""`mini-infer-serve`, whose requests without a seed get the numbers of one fixed sequence instead of random ones.

vLLM's own server has a seed by default (`--seed 0`), so its tests may count on what samples there. Ours draws one for
each request; with the numbers of this sequence a test that samples does the same in every run.
"""

import random
import sys
from types import SimpleNamespace

from mini_infer_engine.api import state
from mini_infer_engine.server.cli import main

if __name__ == "__main__":
    state.secrets = SimpleNamespace(randbits=random.Random(0).getrandbits)  # type: ignore[assignment]
    sys.exit(main())
