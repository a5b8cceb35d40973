"""The files of a host framework begin with its name; each imports its host only inside functions."""
