"""Parts that misbehave on purpose, for tests only."""
