"""Checkpoints: torch's own format, safetensors, and folders that survive a crash."""
