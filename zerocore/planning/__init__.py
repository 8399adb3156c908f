"""What a training step needs and takes, before it runs."""
