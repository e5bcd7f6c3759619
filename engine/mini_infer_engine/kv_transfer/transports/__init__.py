"""Ways to move pages between engines: shared memory, CUDA IPC and NIXL behind one protocol."""
