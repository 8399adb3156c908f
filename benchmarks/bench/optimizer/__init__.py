"""Parts of optimizer.py."""
