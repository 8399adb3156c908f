"""Parts of the benchmark scripts in the folder above."""
