"""The commit of a save: files are written, flushed, agreed on by all ranks, then renamed."""
