"""What tests share: workers of ranks, reference models, sources of the package, summaries."""
