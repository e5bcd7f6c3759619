"""`python -m mini_infer_operator.cli` is `mini-infer`."""

import sys

from mini_infer_operator.cli import main

sys.exit(main())
