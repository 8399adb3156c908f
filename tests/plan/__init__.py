"""Tests of csrc/plan."""
