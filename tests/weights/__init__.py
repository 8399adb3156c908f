"""Tests of full weights for others: exports, averages, parked models, adapters."""
