"""Saves, reads and checks the files of ``torch.distributed.checkpoint``."""
