"""polynya: reinforcement-learning rollouts over any unmodified agent harness.

A gateway stands at the model API boundary, captures the exact token ids and logprobs that the engine sampled,
and rebuilds token-faithful trajectories that any trainer can load.
"""

from importlib.metadata import version

__version__ = version("polynya")
__all__ = ["__version__"]
