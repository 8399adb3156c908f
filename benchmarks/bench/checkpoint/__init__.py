"""Saving and loading beside FSDP2 with torch.distributed.checkpoint, and beside the disk."""
