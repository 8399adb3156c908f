"""Parts of kernels.py, and the timeline of a device's kernels."""
