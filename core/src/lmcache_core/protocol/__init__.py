"""Messages, frames, and errors on the wire."""
