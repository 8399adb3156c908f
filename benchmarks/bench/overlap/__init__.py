"""Parts of overlap.py."""
