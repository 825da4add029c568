"""The device sampler: a process of its own, so that a held interpreter lock cannot delay it."""
