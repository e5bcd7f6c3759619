"""Communication between ranks: all-reduce, gather and pipeline hand-over, by gloo, NCCL or peer memory."""
