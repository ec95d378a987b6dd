"""What happens in a server: events, their subscribers, and metrics."""
