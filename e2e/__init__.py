"""End-to-end tests: real llama.cpp, relay, nodes and browser."""
