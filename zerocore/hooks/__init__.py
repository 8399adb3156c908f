"""What zerocore hooks into torch: moves, loads, registrations, backwards, optimizer steps."""
