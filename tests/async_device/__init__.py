"""A device whose streams are threads, on which the engine's work is asynchronous."""
