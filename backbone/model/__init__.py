"""Models on disk: what a GGUF says about its routed experts, their bytes, and the demo model."""
