"""What a lossy serde does to a model's answers: `lmcache-core quality`."""
