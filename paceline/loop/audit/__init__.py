"""Is an endpoint still the model it claims: what a server says, held against the model itself.

from paceline.loop.audit.run import audit
audit("http://127.0.0.1:8000", EngineConfig(model="smollm2-135m")).verdict
"""
