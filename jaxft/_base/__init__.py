"""The ground floor: numbers, threads, signals, progress."""
