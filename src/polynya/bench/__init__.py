"""What the gateway costs, beside nginx, the routers and the peers, on the same load and on the same core.

Invariant: speed is measured here and asserted nowhere; what is captured is compared with what the mock upstream said, and
a difference is a failure.
"""
