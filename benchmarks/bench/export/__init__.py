"""Parts of export.py."""
