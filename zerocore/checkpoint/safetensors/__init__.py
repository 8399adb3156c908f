"""Models from and to safetensors files."""
