"""The folder of a run: what was asked, the lock, SIGTERM, and where curves are sent."""
