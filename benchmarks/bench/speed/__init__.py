"""Parts of speed.py, which times two builds of zerocore in turns."""
