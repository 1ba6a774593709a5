"""The proxy at the model API boundary: plain ASGI on uvicorn, session keys, keep-alive streaming, retries, admission.

Invariant: every generation that a harness gets back was journalled first, under exactly one session; a request without a
live session key gets an error in its own dialect, never an anonymous session.
"""
