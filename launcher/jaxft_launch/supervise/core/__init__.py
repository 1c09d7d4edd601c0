"""What a supervisor decides: pure values and functions, which the launcher's shell and the simulator drive."""
