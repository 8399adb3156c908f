"""Tests of csrc/device."""
