"""Requests wait at the gateway, not at engines: each endpoint is given what keeps it busy, the rest is placed later."""
