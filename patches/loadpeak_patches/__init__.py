"""The two fixes for a startup peak, both off unless asked for.

The cache release gives unused cached blocks back to the device once a layer's conversion has dropped
its source weights. The split limit fix leaves out the ``max_split_size_mb:20`` that vLLM sets while it
loads, which is what makes the cache grow under expandable segments.
"""
