"""`lmcache-core demo`: a real server, a real model, worker processes, and what happens when they are killed."""
