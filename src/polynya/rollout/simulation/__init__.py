"""A cluster in one thread: the real dispatcher, registry and lease keeper, on a virtual clock, with everything that can go wrong.

Invariant: a seed gives one history, on every machine and in every run, so a failing one can be looked at again. Nothing of the
product imports this; it replaces the network, the time and the work of a node, and nothing else.
"""

from polynya.rollout.simulation.plan import Faults, Plan, Report
from polynya.rollout.simulation.plans import large, rough
from polynya.rollout.simulation.world import simulate

__all__ = ["Faults", "Plan", "Report", "large", "rough", "simulate"]
