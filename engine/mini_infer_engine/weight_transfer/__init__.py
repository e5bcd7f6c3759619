"""Sends loaded weights to engines of the same service that start, and receives them from one that is up.

The control socket speaks CurveZMQ with the service's keys. Bytes of tensors go over plain TCP connections, which a
single-use ticket opens; both sides compare a SHA-256 of every piece over the control socket.
"""
