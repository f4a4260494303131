"""Outrider: lossless speculative decoding."""
