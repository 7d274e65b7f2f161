"""Who may meet whom: signalling between the two ends of a pairing."""
