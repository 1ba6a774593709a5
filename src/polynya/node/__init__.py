"""INIT → READY → RUNNING → POSTRUN: pools, budgets, cancellation, cleanup of the sessions of one machine.

Invariant: each session that was begun ends with one SessionResult and leaves no process, mount or key behind, in whatever
stage it was stopped; what it earned before a time-out or a cancellation is built.
"""

from polynya.node.node import Node, NodeDeps, SessionEvent, SessionHandle, SessionOutput

__all__ = ["Node", "NodeDeps", "SessionEvent", "SessionHandle", "SessionOutput"]
