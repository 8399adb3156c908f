"""Training goes on after what went wrong: state compared, steps taken back, ranks replaced."""
