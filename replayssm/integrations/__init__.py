"""One file per host framework; each imports its host only inside functions."""
