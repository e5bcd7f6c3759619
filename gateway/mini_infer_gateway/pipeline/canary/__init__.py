"""Judging a new revision by requests: its share of them, copies, replays, and the figures of both revisions."""
