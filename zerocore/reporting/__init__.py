"""Reports on training steps: time, bytes, and the memory held when there was none left."""
