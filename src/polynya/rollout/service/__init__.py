"""The rollout service: tasks come in over HTTP, nodes pull sessions, results go out once.

Invariant: everything that was acknowledged stands in the registry; this room only carries requests to the dispatcher and back, so
it may be killed at any moment. It refuses whom it does not know, and knows users, admins and nodes by credentials of their own.
"""
