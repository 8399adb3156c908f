"""Checkpoints in the files of ``torch.distributed.checkpoint``: saved, read in ranges, checked."""
