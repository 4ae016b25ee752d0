"""Context parallelism: each rank holds a share of every sequence, and attention looks at all shares."""
