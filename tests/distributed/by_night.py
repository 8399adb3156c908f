"""Stages of which `make test` runs one, and `make nightly` all."""

import pytest

STAGES_BY_NIGHT = [pytest.param(stage, marks=pytest.mark.nightly) for stage in (0, 1, 2)]
stage_3_by_day = pytest.mark.parametrize("stage", [*STAGES_BY_NIGHT, 3])
