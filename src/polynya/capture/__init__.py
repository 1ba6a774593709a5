"""The journal of intents and calls, and the delta token store. Nothing else writes captured data.

Invariant: an intent is written before its call goes upstream, a record is durable before the harness sees the reply's
terminal event; what was acknowledged is found again after a SIGKILL at any byte.
"""
