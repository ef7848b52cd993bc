"""The demo models: how they are made from nothing, and the finished GGUF files.

One noun a file, in the order in which they are used: `corpus` → `tokenizer` → `architecture` →
`trunk` → `mtp` / `eagle3` → `training` → `export` → `verify`, with `make` as the entry point.
`prompts` cuts the held-out prompts that tests and benchmarks use, and `bench_models` writes
random-weight models of realistic size. Nothing in the three packages imports this folder.
"""
