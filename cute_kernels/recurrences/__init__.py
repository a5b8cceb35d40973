"""What one recurrence adds to the shared algebra: a small policy object each."""
