"""Tasks → sessions → nodes: the one-shot runner, the run directory, task files.

Invariant: a session's result is written once, under its session id, together with its rows; what a run directory says is
finished is finished after a crash too, and what it does not say is run again.
"""
