"""Plans of training steps: the memory they need and the time they take, before they run."""
