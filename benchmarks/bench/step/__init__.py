"""Parts of step.py."""
