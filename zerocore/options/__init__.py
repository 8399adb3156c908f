"""Options of ``shard``: frozen dataclasses that validate themselves."""
