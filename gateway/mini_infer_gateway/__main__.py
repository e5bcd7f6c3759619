"""`python -m mini_infer_gateway`: the same as `mini-infer-gateway`."""

from mini_infer_gateway.entry import main

main()
