"""The command line: Lightning's verbs and ours. Verbs that need no torch start without it."""
