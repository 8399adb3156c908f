"""Tests of csrc/runtime."""
