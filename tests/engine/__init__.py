"""Tests of csrc/engine."""
