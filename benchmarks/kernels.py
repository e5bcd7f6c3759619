"""Tune and time small-M GEMMs on this GPU, against cuBLAS and the separate kernels that it needs.

usage: python benchmarks/kernels.py --out DIR [--time-limit-s SECONDS]
The fastest configs are written to DIR/NVIDIA_H200.json (the GPU's name), which belongs into the engine's
kernels/gemm/configs/; they are never searched at start. (Attention has attention.py and tune_decode.py.)
"""

# transformers looks for a package of this file's name, and imports what it finds: there is nothing to import.
if __name__ == "__main__":
    from common.gemm_tuner import main

    main(__doc__)
