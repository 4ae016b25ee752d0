"""Callbacks that show a run in a profiler: ranges, windows of steps, snapshots of memory."""
