"""What happens in a server, for whoever wants to see it: events, who hears them, and figures."""
