"""The algorithms as pure functions: advantages, policy losses, importance sampling, aggregation."""
