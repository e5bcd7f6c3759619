"""Speculative decoding: drafts the next tokens, several of which the model verifies in one pass. The text stays the
same.
"""
