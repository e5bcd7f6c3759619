"""The ground of every process of ours: its command line, logs, interpreter, open files, listening addresses and ZMQ
sockets.
"""
