"""Tests of csrc/io."""
