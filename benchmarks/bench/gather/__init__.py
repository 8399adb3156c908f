"""Parts of gather.py."""
