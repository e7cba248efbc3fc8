"""Deployment of a new drafter on the server: canary, probation (trial period), rollback."""
