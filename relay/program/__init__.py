"""What the programs share: how they run and stop, how they read values, what they print of strangers."""
