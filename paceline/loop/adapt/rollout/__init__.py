"""Deployment of a candidate: canary, probation, rollback."""
