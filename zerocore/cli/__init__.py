"""The command line, ``python -m zerocore``."""
