"""Runs several engines behind one port: routes requests to them, and publishes their events and load as one engine."""
