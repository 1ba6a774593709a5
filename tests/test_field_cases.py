"""The table of field cases names tests that exist, one row a case, and each case has a test or says where it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = [line for line in (ROOT / "docs" / "field-cases.md").read_text().splitlines() if re.match(r"\| \d", line)]
CASES = [
    1,
    2,
    3,
    4,
    6,
    7,
    8,
    10,
    11,
    12,
    13,
    16,
    17,
    18,
    19,
    20,
    22,
    23,
    24,
    25,
    27,
    28,
    29,
    31,
    33,
    34,
    35,
    36,
    37,
    38,
    39,
    41,
    43,
    44,
    45,
    46,
    48,
    49,
    50,
    51,
    52,
    53,
    55,
    56,
    58,
    59,
    60,
    62,
    63,
    65,
    67,
    69,
    70,
    71,
    72,
    73,
]


def test_every_case_has_one_row() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == CASES


def test_every_named_test_exists_and_no_case_is_empty() -> None:
    for row in ROWS:
        named = re.findall(r"`(tests/[^`]+)::(\w+)`", row)
        assert named or "elsewhere" in row or "a figure" in row, row
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in functions, f"{file}::{name} is named in docs/field-cases.md and does not exist"
