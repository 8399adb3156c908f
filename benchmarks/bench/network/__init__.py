"""Parts of network.py."""
