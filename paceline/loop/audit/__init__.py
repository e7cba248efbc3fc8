"""Audits whether an endpoint serves the model that it claims: compares a server's answers with the model itself.

from paceline.loop.audit.run import audit
audit("http://127.0.0.1:8000", EngineConfig(model="smollm2-135m")).verdict
"""
