"""Published runs are predicted within the goal that the benchmark states."""

from __future__ import annotations

import pytest

from published import GOAL_PERCENT, RUNS, Run, errors_table, predict

pytest.importorskip("transformers")


@pytest.mark.one_by_day
@pytest.mark.parametrize("run", [RUNS[1], RUNS[6]], ids=lambda run: run.name)
def test_a_run_is_predicted_within_the_goal(run: Run) -> None:
    predicted = predict(run)
    assert abs(predicted / run.tokens_per_s - 1) <= GOAL_PERCENT / 100
    assert errors_table([(run, predicted)]).notes[0].startswith("1 of 1 within")
