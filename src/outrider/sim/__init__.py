"""What speculation would do: formulas, and the engine's own loop on a virtual clock."""
