"""Hints at misspelt names."""

from __future__ import annotations

from rollout.base.hints import nearest_hint


def test_similar_names_are_hinted_at() -> None:
    assert nearest_hint("atc", ["act", "see"]) == "; nearest: act"
    assert nearest_hint("xyz", ["act", "see"]) == ""
    assert nearest_hint("atc", ["act"], label="nearest tools") == "; nearest tools: act"
