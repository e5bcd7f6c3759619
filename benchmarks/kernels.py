"""Tune small-M GEMMs of the twenty most used checkpoints on this GPU, against what the engine takes now and cuBLAS.

usage: python benchmarks/kernels.py --out DIR [--time-limit-s SECONDS] [--again]
The same as `mini-infer tune --checkpoints --out DIR`. The fastest configs are written to DIR/NVIDIA_H200.json (the
GPU's name), which belongs into the engine's kernels/gemm/configs/; they are never searched at start. (Attention has
attention.py and tune_decode.py.)
"""

import sys

# transformers looks for a package of this file's name, and imports what it finds: there is nothing to import.
if __name__ == "__main__":
    from mini_infer_engine.tools.tuning.command import main

    sys.exit(main(["--checkpoints", *sys.argv[1:]]))
