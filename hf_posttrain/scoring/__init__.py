"""Scoring: rows of examples become one value per trained token, without logits of the whole batch."""
