"""Responses of /v1/responses that are kept: the same for a gateway and for an engine that has none before it."""
