"""Checks of the repository itself: imports, lengths, what is where."""
