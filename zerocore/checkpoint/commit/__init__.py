"""Files on their way to the disk: written aside, flushed, agreed on by all ranks, renamed."""
