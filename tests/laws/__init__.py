"""Executable proofs: the exact output law of every acceptance rule, against the target's own."""
