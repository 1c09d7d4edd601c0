"""What people see of the jobs: events, accounts of time, counters. No decision depends on anything here."""
