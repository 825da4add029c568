"""PyTorch's CUDA caching allocator as a model, and recorded histories replayed through it.

    settings   what a conf string says
    sizes      what a request becomes
    pools      free blocks, sorted as the allocator sorts them
    segments   memory that comes from and goes back to the device
    model      one device's allocator: allocate, free, empty the cache, retry, run out
    history    a recorded history as compact operations
    start      what was there before the history began
    replay     a history under other settings and release policies

The rules are those of torch 2.7 to 2.13. Each names the PyTorch function that it restates, all of them in
``c10/cuda/CUDACachingAllocator.cpp`` unless another file is named; docs/allocator.md compares the model with
recorded runs. Nothing here needs torch.
"""
