"""Rows of examples -> one value per trained token, without logits of the whole batch."""
