"""A candidate on a server: canary, probation, rollback."""
