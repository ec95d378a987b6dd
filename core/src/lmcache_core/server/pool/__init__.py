"""The L1: the kernel's decisions carried out on the pool, what was adopted, quotas, and what is counted."""
