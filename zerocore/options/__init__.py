"""Options of ``shard``: frozen dataclasses, validated when built."""
