"""A sharded parameter as torch sees it: where it lies, and what torch functions mean on it."""
