"""Records one vLLM startup completely: phases, layers, allocator and device memory.

Data flows one way: probes read the allocator and the device, the session turns readings into
lines, the journal appends them to the record of the run. Everything that shows a record
(metrics, pages, comparisons) lives in ``loadpeak_exporter`` and reads the record from disk.
"""

__version__ = "0.1.0"
