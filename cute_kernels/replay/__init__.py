"""The algebra of a checkpoint and a ring of records: cursor, decay, window, readout, fold."""
