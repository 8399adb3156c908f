"""Tests of csrc/engine and csrc/comm."""
