"""Tests of csrc/emulation."""
