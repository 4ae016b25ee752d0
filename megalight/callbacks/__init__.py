"""Lightning callbacks, one job each."""
