"""Parts of kernels.py, and a reader of a GPU's timeline."""
