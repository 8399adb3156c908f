"""Which elements of a tensor are whose: places, boxes of a range, and which rank saves which."""
