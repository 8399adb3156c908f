"""A device of streams that are threads: what `csrc/runtime` does on it is asynchronous."""
