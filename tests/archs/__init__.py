"""Every architecture of llama.cpp, on tiny models: the engine against itself and llama-server."""
