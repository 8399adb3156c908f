"""The elements that each rank holds and saves: places of shards, cuts, and boxes of ranges."""
