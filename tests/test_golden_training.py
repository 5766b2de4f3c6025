"""Losses and masks against vectors computed by the original modules."""

from pathlib import Path

import pytest

from golden_losses import check_losses
from golden_masks import check_chat_mask, check_masks

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("folder", "check", "least"),
    [("losses", check_losses, 110), ("masks", check_masks, 11), ("chat_mask", check_chat_mask, 8)],
)
def test_every_stored_value_is_reproduced(folder, check, least):
    rows = check(GOLDEN / folder)
    assert len(rows) >= least
    for name, error, tolerance in rows:
        assert error <= tolerance, f"{name}: {error} is above {tolerance}"
