"""Token arithmetic: validation, the call forest, builders, masks and the ledger.

Pure: no I/O, no clock, no randomness; the same calls in the same commit order give the same rows, byte for byte.
Refuses to repair: ids that do not line up are excluded with a reason or start a row of their own.
"""

from polynya.tokens.builders import BUILDERS, Built, build
from polynya.tokens.calls import CapturedCall
from polynya.tokens.validate import Judgement, judge, row_problem

__all__ = ["BUILDERS", "Built", "CapturedCall", "Judgement", "build", "judge", "row_problem"]
