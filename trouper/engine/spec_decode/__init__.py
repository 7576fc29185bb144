"""Speculative decoding: proposing drafts and verifying them."""
