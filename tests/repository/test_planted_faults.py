"""The faults that are planted to see whether tests find them still fit the code."""

from __future__ import annotations

import pytest

from tests.planted_faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_code_has_the_text_and_the_tests(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) > 0
    assert all((ROOT / "tests" / name).exists() for name in fault.tests.split())
