"""docs/theory.md: every block of code runs, and every number of the text is in one."""

import re

from conftest import ROOT

PAGE = (ROOT / "docs/theory.md").read_text()


def test_the_code_runs_and_every_block_can_fail():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 11 and all("assert" in block for block in blocks[1:])
    assert len(PAGE.splitlines()) <= 150


def test_every_number_with_a_point_is_in_the_code_below_it():
    for section in PAGE.split("\n## ")[1:]:
        *parts, end = re.split(r"```python\n(.*?)```", section, flags=re.DOTALL)
        code = " ".join(parts[1::2])
        text = " ".join([*parts[::2], end])
        for number in re.findall(r"(?<![\w.])-?\d+\.\d+", text):
            assert number.rstrip("0").rstrip(".") in code, number
