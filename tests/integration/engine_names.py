"""Messages that the engine script raises and the tests expect; plain text, needs no vLLM."""

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.74 GiB of which "
    "401.38 MiB is free. Process 4711 has 31.34 GiB memory in use. Of the allocated memory 30.20 GiB is "
    "allocated by PyTorch, and 655.12 MiB is reserved by PyTorch but unallocated."
)
OTHER = "expected 128 experts in the checkpoint, found 64"
