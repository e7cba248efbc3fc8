"""Run folders: settings and results, the lock, SIGTERM handling, experiment trackers."""
