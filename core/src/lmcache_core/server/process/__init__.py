"""The server's process: its loop, its signals, and the names at which others find it."""
