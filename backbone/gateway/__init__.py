"""The OpenAI-compatible door to the engine."""
