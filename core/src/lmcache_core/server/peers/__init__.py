"""Who is connected: carriers, sessions and their ends, and each holder's share of what all use."""
