"""The border with llama.cpp: the ggml device "Swarm", the engine process and the messages between it and us."""
