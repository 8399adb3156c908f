"""What a training step took, and what held memory when there was none left."""
