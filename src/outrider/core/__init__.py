"""The heart: types, the round, sampling, randomness. Knows torch and the standard library only."""
