"""The example of README.md, cut out and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="not in a checkout")
def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example
    exec(example[1], {})
    assert "[1, 8, 512, 512]" in capsys.readouterr().out
