"""Parts of checkpoint.py, which compares saves and loads with FSDP2's and with the disk's rate."""
