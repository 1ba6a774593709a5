"""The web view of a run: one self-contained HTML file made from the files of a run directory.

It reads files only, so it works without a server and while the run goes on. It knows ``polynya.schema`` and nothing else
of polynya.
"""

from polynya.viewer.data import RunData, load
from polynya.viewer.page import render

__all__ = ["RunData", "load", "render"]
