"""`python -m mini_infer_gateway`: runs the command `mini-infer-gateway`."""

from mini_infer_gateway.entry import main

main()
