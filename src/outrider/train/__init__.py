"""Training of draft heads: the target's own answers and hidden states, the loop, what was trained as served."""
