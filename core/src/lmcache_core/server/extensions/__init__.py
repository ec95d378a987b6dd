"""What plugins run in the server or beside it: companions, operations and helper processes."""
