"""One connection to a server: made, greeted, kept and remade, and who is inside which slots meanwhile."""
