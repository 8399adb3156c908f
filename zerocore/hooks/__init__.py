"""Hooks into torch: moves, loads, registrations, backwards, optimizer steps."""
