"""Real servers that tests stand up: one file for each way to do it."""
