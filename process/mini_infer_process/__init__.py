"""How a process of ours runs: its command line, logs, interpreter, open files, listening addresses and ZMQ sockets."""
