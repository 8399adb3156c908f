"""Tests of csrc/memory."""
