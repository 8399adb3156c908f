"""Parts of offload.py."""
