"""Where nodes run. One machine needs nothing of it: ``rollout.runner`` holds one node in its own process.

Empty as yet; placement of nodes on many machines (Ray) is to come here. It will carry no sessions and no tokens.
"""
