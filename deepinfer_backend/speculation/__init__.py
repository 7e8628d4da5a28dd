"""Drafters: what proposes the tokens that a step verifies, one file each behind one interface."""
