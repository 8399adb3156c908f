"""Parts of host_overhead.py."""
