"""Tasks → sessions → nodes: the one-shot runner and its run directory, task files; registry, dispatcher and leases of the server.

Invariant: a session's result is written once, under its session id, together with its rows; what a run directory or a registry says is
finished is finished after a crash too, and what it does not say is run again.
"""
