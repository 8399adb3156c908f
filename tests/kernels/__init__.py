"""Tests of csrc/kernels."""
