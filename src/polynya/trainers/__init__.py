"""Rows for trainers: import-light, knowing the run directory and nothing inside.

Invariant: what is read is what was written, id by id; a null reward stays null and is never a number.
Bridges to single trainers are to come here, one file each.
"""

from polynya.trainers.rows import Row, read_groups, read_rows

__all__ = ["Row", "read_groups", "read_rows"]
