"""Tests on real ranks."""
