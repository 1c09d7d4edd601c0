"""The decisions of a supervisor: pure values and functions, which the launcher's shell and the simulator drive."""
