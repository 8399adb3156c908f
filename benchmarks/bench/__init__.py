"""The parts of the scripts of this folder, which find them beside themselves."""
