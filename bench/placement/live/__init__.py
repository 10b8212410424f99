"""Random clusters on a real control plane: what was applied beside what was foretold."""
