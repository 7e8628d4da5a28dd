from __future__ import annotations

import pytest

from deepinfer_backend.engine.draft_policy import ALL_DRAFTS, DraftPolicy


@pytest.fixture
def every_draft_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays or not: models that are made for tests have steps of a millisecond, and few drafts are right."""
    monkeypatch.setattr(DraftPolicy, "threshold", lambda *_: ALL_DRAFTS)
