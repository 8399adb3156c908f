"""Which boxes of a tensor a range of its elements fills, and which rank saves which."""
