"""What ranks compute together: sums, gathers and hand-overs, over gloo, NCCL or each other's memory."""
