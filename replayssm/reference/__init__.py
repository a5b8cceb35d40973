"""The recurrences in plain torch: `recurrence` token by token, `replay` from a checkpoint and a ring of records."""
