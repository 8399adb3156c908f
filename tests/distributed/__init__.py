"""Real ranks: the harness, and what crosses packages: programs, parity, random models."""
