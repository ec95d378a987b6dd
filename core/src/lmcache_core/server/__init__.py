"""The process that owns the pool and all metadata: one loop thread around the kernel."""
