"""Loads and saves models as safetensors files."""
