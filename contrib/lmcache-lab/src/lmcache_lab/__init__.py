"""Study a cache: read and replay recordings of a server, make workloads, and simulate eviction policies over them."""
