"""Helpers for every other package: agreement of ranks, process groups, quantities, tables."""
