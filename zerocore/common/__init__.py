"""Helpers that every other package may use: quantities, links, events, clocks, tables."""
